"""Stretches of inference programs in chunks: budgets that nothing else keeps, equal numbers, and what is refused."""

import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from torch import nn

import memopt
from memopt.budget import BudgetError
from memopt.memory.cost.devices import CPU
from memopt.memory.cost.table import OperatorCost
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.chunk_batch import ChunkBatch
from memopt.patterns.batch import NotBatched
from memopt.solve.chunks import Stretch
from memopt.step.stretches import TOLD, Stretches, chunks_line, counts_of
from tests.end_to_end import build, in_dtype
from tests.generate import recipes
from tests.oracle import Bound, program_of
from tests.passes.build import trace
from tests.solve.check_chunks import check_chunks
from tests.support import apply, capture, run
from tests.test_inference import floats, warm_up_statistics
from tests.test_random_programs import check_rewrite, run_program

MODELS = ("resnet50", "densenet121", "unet", "mobilenet_v3_large", "bert_base", "vit_b_16", "gpt2", "hf_bert", "hf_vit")
SLOW = {"seconds": 1e-3, "workspace_bytes": 0, "output_bytes": 0, "measured": False}


def stretches_of(program, launch=True):
    costs = {node.name: OperatorCost(**SLOW) for node in program.calls} if launch else {}
    return Stretches(program, timeline(program), costs, CPU)


def prepared(name):
    model, inputs = build(name, labels=False)
    warm_up_statistics(model)
    model.eval().double()
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model, in_dtype(inputs, torch.float64)


@pytest.mark.quick("densenet121", "unet", "gpt2", "hf_vit")
@pytest.mark.parametrize("name", MODELS)
def test_models_keep_every_limit_that_the_search_promises_with_the_same_numbers(name):
    model, inputs = prepared(name)
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, **inputs))
    found = stretches_of(program)
    least, whole = found.search.minimum_bytes(), timeline(program).peak_bytes
    with torch.no_grad():
        expected = floats(model(**inputs))
    tried = set()
    for part in range(4):
        chunking, parts = found.within(least + part * (whole - least) // 4)
        check_chunks(found.search.problem, chunking)
        if not parts or parts in tried:
            continue
        tried.add(parts)
        divided, records = PassManager([ChunkBatch.of(parts)]).run(program)
        assert len(records[0].changes) == len(parts), records[0].refusals
        values = [value for value in run(divided, **inputs) if value.is_floating_point()]
        for value, exact in zip(values, expected, strict=False):
            torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10 * float(exact.abs().max()))
    assert tried or least == whole


@pytest.mark.quick("unet-aten")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("unet", "static"),
        ("unet", "aten"),
        ("vit_b_16", "static"),
        pytest.param("resnet50", "aten", marks=pytest.mark.slow),
        pytest.param("resnet50", "static", marks=pytest.mark.slow),
        pytest.param("vit_b_16", "aten", marks=pytest.mark.slow),
        pytest.param("densenet121", "static", marks=pytest.mark.slow),
        pytest.param("densenet121", "aten", marks=pytest.mark.slow),
    ],
)
def test_a_budget_that_only_chunks_keep_is_kept(name, backend):
    model, inputs = prepared(name)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = floats(model(**inputs))
        free = memopt.compile(model, backend=backend)
        free(**inputs)
        torch._dynamo.reset()
        with pytest.raises(BudgetError) as caught:
            memopt.compile(model, "1kB", backend=backend)(**inputs)
        least = caught.value.minimum_bytes
        budget = least + (free.report.peak_bytes - least) // 3
        torch._dynamo.reset()
        compiled = memopt.compile(model, budget, backend=backend)
        found = floats(compiled(**inputs))
    assert free.report.peak_bytes > budget >= max(compiled.report.peak_bytes, compiled.report.measured_peak_bytes or 0)
    assert any(record.name == "chunk_batch" and record.changes for record in compiled.report.passes)
    assert any("in chunks" in note or "chunks of the batch" in note for note in compiled.report.notes)
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10 * float(exact.abs().max()))


@pytest.mark.long
def test_resnet50_on_an_h100_runs_its_first_layers_in_chunks_and_the_rest_whole():
    model = memopt.models.build("resnet50").eval().half()
    inputs = in_dtype(model.example_inputs(batch=32, resolution=224), torch.float16)
    report = memopt.plan(model, inputs, budget="200MiB", device="h100", verify=False)
    assert report.peak_bytes <= 200 * 2**20 < report.unconstrained_bytes
    (note,) = [text for text in report.notes if text.startswith("to keep the budget")]
    assert "operations (convolution" in note and "chunks of the batch of 32" in note
    (record,) = [record for record in report.passes if record.name == "chunk_batch"]
    assert 10 < len(record.changes[0].before) < 0.7 * record.nodes_before


def test_what_crosses_a_stretch_stays_whole():
    """A skip connection over a stretch, as in a U-Net."""

    def function(x, w):
        skip = x.exp()
        wide = skip.repeat(1, 1, 8).sin()
        return ((wide @ w) + skip,)

    x, w = torch.randn(8, 16, 32, dtype=torch.float64), torch.randn(256, 32, dtype=torch.float64)
    program = trace(function, x, w)
    found = stretches_of(program)
    names = [str(node.target) for node in program.calls]
    last = next(k for k, node in enumerate(program.calls) if "add" in str(node.target))
    divided = apply(ChunkBatch(4, (0, last)), program).program
    assert [str(node.target) for node in divided.calls].count("aten.cat.default") == 2
    torch.testing.assert_close(divided.run(x, w), program.run(x, w))
    joined = [value for value in found.search.problem.values if value.made == 0]
    assert joined[0].last == names.index("aten.add.Tensor") and joined[0].size == x.nbytes


def test_a_sum_over_the_batch_splits_what_can_be_divided():
    def function(x):
        wide = torch.cat([x.exp(), x.sin(), x.cos()], 1)
        small = wide.amax(1)
        centred = small - small.mean(0)
        wide = torch.cat([centred.exp(), centred.sin(), centred.cos()], 1)
        return (wide.amax(1),)

    x = torch.randn(8, 64, 64, dtype=torch.float64)
    program = trace(function, x)
    found = stretches_of(program)
    refused = [node.name for node in program.calls if node in found.batch.reasons]
    assert refused and found.reason.startswith(f"{refused[0]}: ") and "which is the batch" in found.reason
    chunking, parts = found.within(found.search.minimum_bytes())
    assert parts and chunking.peak_bytes < timeline(program).peak_bytes
    names = [node.name for node in program.calls]
    assert all(names[k] not in refused for s in parts for k in range(s.start, s.stop))
    divided, _ = PassManager([ChunkBatch.of(parts)]).run(program)
    torch.testing.assert_close(divided.run(x), program.run(x))


def test_items_of_a_result_stay_with_their_operation():
    def function(x):
        values, indices = torch.topk(x.exp(), 2, dim=1)
        return (values.sin(), indices + 1)

    program = trace(function, torch.randn(6, 8))
    found = stretches_of(program)
    calls = program.calls
    for limit in range(found.search.minimum_bytes(), timeline(program).peak_bytes, 40):
        _, parts = found.within(limit)
        assert all("getitem" not in calls[s.start].name for s in parts)
        if parts:
            assert PassManager([ChunkBatch.of(parts)]).run(program)[1][0].changes


def test_without_a_batch_there_are_no_stretches():
    with pytest.raises(NotBatched, match="no batch"):
        stretches_of(trace(lambda x: (x.exp(),), torch.randn(1, 8)))


def test_counts_make_equal_chunks_or_are_powers_of_two():
    assert counts_of(6) == (2, 3, 4, 6)
    assert counts_of(32) == (2, 4, 8, 16, 32)
    assert counts_of(7) == (2, 4, 7)


def test_what_the_user_is_told():
    program = capture(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval(), torch.randn(4, 4))
    calls = program.calls
    text = chunks_line([Stretch(0, len(calls), 2)], program, 4, 1.5e-3)
    assert text.startswith(TOLD) and text.endswith("that takes 1.5 ms more by estimate")
    assert f"({calls[0].name} to {calls[-1].name}) run in 2 chunks of the batch of 4" in text


def test_what_is_in_the_way_is_in_the_error():
    class Centred(nn.Module):
        def forward(self, x):
            wide = torch.cat([x, x.exp(), x.sin()], 1)
            return (wide - wide.mean(0)).exp()

    with torch.no_grad(), pytest.raises(BudgetError, match=r"cannot be run in chunks: mean: .*which is the batch"):
        memopt.compile(Centred().eval(), "1kB", backend="static")(torch.randn(64, 64))


def test_random_programs_keep_the_least_limit_with_the_same_numbers_or_are_refused():
    divided = 0

    @seed(7)
    @settings(max_examples=80, database=None, suppress_health_check=list(HealthCheck))
    @given(recipes())
    def explore(recipe):
        nonlocal divided
        program = program_of(recipe)
        try:
            found = stretches_of(program)
        except NotBatched:
            reject()
        chunking, parts = found.within(found.search.minimum_bytes())
        check_chunks(found.search.problem, chunking)
        if parts:
            before, bound = run_program(program, recipe), Bound(recipe, program)
            divided += check_rewrite(ChunkBatch.of(parts), program, before, recipe, bound) is not program

    explore()
    assert divided > 15
