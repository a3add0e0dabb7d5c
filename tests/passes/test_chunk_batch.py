"""ChunkBatch: real models in chunks equal to float64, what is sliced, and every reason to refuse."""

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import nn

import memopt
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.chunk_batch import ChunkBatch, bounds
from memopt.patterns.batch import Batched, find_batch
from memopt.patterns.chunks import chunk_of
from memopt.program import Program
from memopt.solve.chunks import Stretch
from tests.end_to_end import build, in_dtype
from tests.generate import recipes
from tests.oracle import Bound, program_of
from tests.passes.build import trace
from tests.support import apply, capture, run
from tests.test_inference import floats, warm_up_statistics
from tests.test_random_programs import check_rewrite, run_program

MODELS = (
    "resnet18",
    "densenet121",
    "mobilenet_v3_large",
    "unet",
    "vit_b_16",
    "bert_base",
    "gpt2",
    "llama_tiny",
    "hf_bert",
    "hf_gpt2",
    "hf_vit",
    "hf_llama",
)


def refusal(program: Program, chunks: int = 2) -> str:
    result = apply(ChunkBatch(chunks), program)
    assert result.program is program and len(result.refusals) == 1
    return result.refusals[0].reason


def peak(program: Program) -> int:
    return timeline(program, {}).peak_bytes


@pytest.mark.quick("resnet18", "unet", "gpt2", "llama_tiny", "hf_vit")
@pytest.mark.parametrize("name", MODELS)
def test_models_in_chunks_are_what_they_were_in_less_memory(name):
    model, inputs = build(name, labels=False)
    warm_up_statistics(model)
    model.eval().double()
    if hasattr(model, "config"):
        model.config.use_cache = False
    inputs = in_dtype(inputs, torch.float64)
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, **inputs))
    with torch.no_grad():
        expected = floats(model(**inputs))
        for chunks in (2, 3):
            divided, records = PassManager([ChunkBatch(chunks)]).run(program)
            assert records[0].changes and not records[0].refusals
            found = [value for value in run(divided, **inputs) if value.is_floating_point()]
            # Results exist twice where they are put together: only `backends.static` writes them in place.
            results = sum(value.numel() * value.element_size() for value in found)
            assert peak(divided) < peak(program) or 2 * results > peak(program)
            for value, exact in zip(found, expected, strict=False):
                assert value.stride() == exact.stride()
                torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10 * float(exact.abs().max()))


def test_chunks_of_a_batch_that_is_no_multiple():
    assert bounds(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert bounds(2, 8) == [(0, 1), (1, 2)]


def test_tokens_of_samples_as_rows_of_a_matrix():
    program = capture(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 5, 8))
    batch = find_batch(program)
    assert Batched(0, 5) in batch.states.values()
    apply(ChunkBatch(3), program)


def test_what_has_an_entry_for_each_sample_is_sliced_and_the_rest_is_computed_once():
    def function(x, token):
        scale = token.exp()
        return (torch.cat((token.expand(4, 1, 8), x * scale), 1),)

    program = trace(function, torch.randn(4, 3, 8), torch.randn(1, 8))
    new = apply(ChunkBatch(2), program).program
    names = [str(node.target) for node in new.calls]
    assert names.count("aten.exp.default") == 1 and names.count("aten.mul.Tensor") == 2
    args = (torch.randn(4, 3, 8), torch.randn(1, 8))
    assert torch.equal(new.run(*args)[0], program.run(*args)[0])


def test_a_result_keeps_its_layout():
    program = trace(lambda x: (x.exp().permute(2, 0, 1),), torch.randn(6, 3, 4))
    new = apply(ChunkBatch(3), program).program
    x = torch.randn(6, 3, 4)
    assert new.run(x)[0].stride() == program.run(x)[0].stride()
    assert torch.equal(new.run(x)[0], program.run(x)[0])


def test_a_stretch_of_the_program():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    new = apply(ChunkBatch(2, (0, 2)), capture(model, torch.randn(4, 3, 8, 8))).program
    names = [str(node.target) for node in new.calls]
    assert names.count("aten.convolution.default") == 2 and names.count("aten.addmm.default") == 1


def test_an_average_over_an_image_is_looked_at_with_other_strides():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1))
    model, x = model.to(memory_format=torch.channels_last), torch.randn(4, 3, 8, 8)
    program = capture(model, x.to(memory_format=torch.channels_last))
    assert any(node.target is torch.ops.aten.as_strided.default for node in program.calls)
    for chunks in (2, 4):
        new = apply(ChunkBatch(chunks), program).program
        x = x.to(memory_format=torch.channels_last)
        torch.testing.assert_close(run(new, x), run(program, x))


def test_a_chunk_that_lies_otherwise_than_the_whole_is_not_looked_at_by_its_strides():
    def function(x):
        turned = x.exp().t().contiguous().t()  # the batch is the innermost dimension in memory
        return (turned.as_strided((4, 3), (1, 4)).sin(),)

    assert "lies in memory otherwise" in refusal(trace(function, torch.randn(4, 3)))


def test_several_stretches_each_in_chunks_of_its_own():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4), nn.Sigmoid())
    program = capture(model, torch.randn(4, 3, 8, 8))
    count = len(program.calls)
    result = apply(ChunkBatch.of([Stretch(0, 2, 2), Stretch(count - 1, count, 4)]), program)
    names = [str(node.target) for node in result.program.calls]
    assert names.count("aten.convolution.default") == 2 and names.count("aten.sigmoid.default") == 4
    assert [change.summary.split(" in ")[1] for change in result.changes] == ["2 chunks", "4 chunks"]
    marks = [chunk_of(node) for node in result.program.calls if node.target is torch.ops.aten.sigmoid.default]
    assert [mark.index for mark in marks] == [0, 1, 2, 3] and len({mark.stretch for mark in marks}) == 1
    assert chunk_of(next(n for n in result.program.calls if n.target is torch.ops.aten.addmm.default)) is None


@pytest.mark.parametrize("stretches", [[], [Stretch(2, 4, 2), Stretch(0, 2, 2)], [Stretch(0, 3, 2), Stretch(2, 4, 2)]])
def test_stretches_out_of_order_are_refused_at_once(stretches):
    with pytest.raises(ValueError, match="in order"):
        ChunkBatch.of(stretches)


def test_values_laid_out_channels_last_are_put_together_without_turning_them():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    program = capture(model, x)
    new = apply(ChunkBatch(2, (0, 2)), program).program
    assert not any(node.target is torch.ops.aten.permute.default for node in new.calls)
    (joined,) = [node for node in new.calls if node.target is torch.ops.aten.cat.default]
    assert joined.meta["val"].is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(run(new, x), run(program, x))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x - x.mean(0),), "works along dimension 0, which is the batch"),
        (lambda x: (x.sum(),), "reduces over the batch"),
        (lambda x: (x.softmax(0),), "works along dimension 0, which is the batch"),
        (lambda x: (x.flatten(0, 1).cumsum(0),), "works along dimension 0"),
        (lambda x: (torch.einsum("bij,bik->jk", x, x),), "batch"),
        (lambda x: (x[0],), "works along dimension 0"),
        (lambda x: (x[1:],), "takes a part of the batch"),
        (lambda x: (x.flip(0),), "works along dimension 0"),
        (lambda x: (torch.cat((x, x)),), "works along dimension 0"),
        (lambda x: (x.repeat(2, 1, 1),), "copies of samples"),
        (lambda x: (x.transpose(0, 1).clone().reshape(-1, 6),), "merges the batch with a dimension before it"),
        (lambda x: (torch.ops.aten.native_dropout(x, 0.5, True)[0],), "random"),
        (lambda x: (x.exp(), torch.ones(3)), "a result without a batch dimension"),
        (lambda x: (torch.linalg.det(x @ x.mT),), "not known"),
    ],
)
def test_a_program_that_mixes_samples_is_refused_with_the_reason(function, reason):
    assert reason in refusal(trace(function, torch.randn(4, 3, 6)))


def test_batch_norm_in_training_mode_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    assert "training mode" in refusal(capture(model, torch.randn(4, 3, 8, 8)))


def test_instance_norm_is_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True)).eval()
    program = capture(model, torch.randn(4, 3, 8, 8))
    new = apply(ChunkBatch(2), program).program
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(run(new, x), run(program, x))


def test_without_a_batch_there_is_nothing_to_divide():
    assert "no batch" in refusal(trace(lambda x: (x.exp(),), torch.randn(1, 8)))


def test_one_chunk_is_refused_at_once():
    with pytest.raises(ValueError, match="at least 2"):
        ChunkBatch(1)


def test_random_programs_are_right_or_refused():
    divided = 0

    @seed(5)
    @settings(max_examples=120, database=None, suppress_health_check=list(HealthCheck))
    @given(recipes())
    def explore(recipe):
        nonlocal divided
        program = program_of(recipe)
        before, bound, count = run_program(program, recipe), Bound(recipe, program), len(program.calls)
        for item in (ChunkBatch(2), ChunkBatch(3), ChunkBatch(2, (count // 3, count))):
            divided += check_rewrite(item, program, before, recipe, bound) is not program

    explore()
    assert divided > 30
