"""Programs in chunks as pieces: what is shared, what is put together in place, and the same numbers."""

import pytest
import torch
from torch import nn

import memopt
from memopt.backends import fused_convolution
from memopt.backends.aten import emit
from memopt.backends.chunked import ChunkedCode, NotInPieces, is_chunked
from memopt.backends.inductor import InductorBackend
from memopt.backends.static import StaticBackend, minimum_timeline
from memopt.graph.rewrite import forget_inplace
from memopt.inductor.inference import InductorInference, _lowered_boxed
from memopt.memory.allocator import pooled_bytes
from memopt.memory.measure import measure
from memopt.memory.timeline import timeline
from memopt.pass_manager import PassManager
from memopt.passes.chunk_batch import ChunkBatch
from memopt.passes.inplace import Inplace
from memopt.patterns.chunks import Chunk, chunk_of, mark
from memopt.program import InputKind
from memopt.solve.chunks import Stretch
from tests.end_to_end import build, in_dtype
from tests.passes.build import trace
from tests.support import capture, run
from tests.test_inference import floats, warm_up_statistics

MODELS = ("resnet50", "densenet121", "unet", "mobilenet_v3_large", "bert_base", "vit_b_16", "gpt2", "llama_tiny")


def given(program, *users):
    """The values of all inputs, in order."""
    rest = iter(users)
    return [program.state[e.name] if e.kind is not InputKind.USER else next(rest) for e in program.inputs]


def in_chunks(program, *stretches):
    new, records = PassManager([ChunkBatch.of(stretches), Inplace()], False).run(program)
    assert records[0].changes, records[0].refusals
    return new


def pieces_of(code):
    return [call.piece for call in code._calls]


@pytest.mark.quick("resnet50", "llama_tiny", "vit_b_16")
@pytest.mark.parametrize("name", MODELS)
def test_models_in_pieces_are_what_they_were(name):
    model, inputs = build(name, labels=False)
    warm_up_statistics(model)
    model.eval().double()
    inputs = in_dtype(inputs, torch.float64)
    program, _ = PassManager(memopt.INFERENCE, verify=False).run(capture(model, **inputs))
    count = len(program.calls)
    with torch.no_grad():
        expected = floats(model(**inputs))
        halves = [Stretch(0, stop, 2) for stop in range(count // 2, 0, -1)]
        rests = [Stretch(start, count, 3) for start in range(count // 4, count)]
        for stretch in (allowed(program, halves), allowed(program, rests)):
            divided = in_chunks(program, stretch)
            assert is_chunked(divided) and not is_chunked(program)
            code = ChunkedCode(divided, emit)
            found = [value for value in code(*given(divided, *inputs.values())) if value.is_floating_point()]
            for value, exact in zip(found, expected, strict=False):
                torch.testing.assert_close(value, exact, rtol=1e-10, atol=1e-10 * float(exact.abs().max()))


def allowed(program, stretches):
    """The first stretch that is not refused."""
    return next(stretch for stretch in stretches if ChunkBatch.of([stretch]).run(program).changes)


def two_stages():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(model, nn.Linear(16 * 16, 4)).eval()


def test_chunks_of_equal_sizes_are_one_function_that_writes_into_the_result():
    x = torch.randn(6, 3, 8, 8)
    program = capture(two_stages(), x)
    code = ChunkedCode(in_chunks(program, Stretch(0, 4, 3)), emit)
    *chunks, rest = pieces_of(code)
    assert code.functions == 2 and [piece.chunk.index for piece in chunks] == [0, 1, 2] and rest.chunk is None
    assert all(not piece.makes and len(piece.writes) == 1 for piece in chunks)
    places = [piece.writes[0][1] for piece in chunks]
    assert [(place.dim, place.start, place.stop) for place in places] == [(0, 0, 2), (0, 2, 4), (0, 4, 6)]
    assert not any(node.target is torch.ops.aten.cat.default for piece in pieces_of(code) for node in piece.nodes)
    uneven = ChunkedCode(in_chunks(program, Stretch(0, 4, 4)), emit)
    assert uneven.functions == 3  # chunks of two samples, of one, and the rest


def test_what_is_put_together_is_never_there_twice():
    program = trace(lambda x: (x.repeat(1, 16).sin().cumsum(1),), torch.randn(64, 512))
    last = len(program.calls)
    divided = in_chunks(program, Stretch(0, last, 16))
    code = ChunkedCode(divided, emit)
    x = torch.randn(64, 512)
    result = 16 * x.nbytes
    assert measure(lambda: code(x), device=x.device).peak_bytes <= result + 3 * result // 16
    torch.testing.assert_close(code(x)[0], program.run(x)[0])


def test_what_is_read_last_in_a_piece_may_be_freed_in_it():
    program = trace(lambda x: (x.repeat(1, 16).sin().cos().exp().amax(1),), torch.randn(64, 512))
    divided = in_chunks(program, Stretch(0, 2, 4))
    code = ChunkedCode(divided, emit)
    x = torch.randn(64, 512)
    assert measure(lambda: code(x), device=x.device).peak_bytes <= 2 * 16 * x.nbytes + x.nbytes
    torch.testing.assert_close(code(x), list(program.run(x)))


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_the_memory_of_pieces_is_what_is_measured(chunks):
    program = trace(lambda x: (x.repeat(1, 16).sin().cos().exp().amax(1).exp().sin(),), torch.randn(64, 512))
    divided = in_chunks(program, Stretch(0, 3, chunks))
    code, x = ChunkedCode(divided, emit), torch.randn(64, 512)
    predicted, measured = minimum_timeline(divided).peak_bytes, measure(lambda: code(x), device=x.device).peak_bytes
    wide = 16 * x.nbytes // chunks
    assert abs(measured - predicted) <= wide  # a result is written into the whole, or beside it first


def test_several_stretches_and_what_lies_between():
    x = torch.randn(6, 8)
    program = trace(lambda x: (x.exp().sin().cos().exp().tanh(),), x)
    divided = in_chunks(program, Stretch(0, 2, 2), Stretch(2, 3, 3), Stretch(4, 5, 2))
    code = ChunkedCode(divided, emit)
    assert [piece.chunk and piece.chunk.index for piece in pieces_of(code)] == [0, 1, 0, 1, 2, None, 0, 1]
    torch.testing.assert_close(code(x), list(program.run(x)))


def test_a_result_laid_out_otherwise_keeps_its_strides():
    x = torch.randn(6, 3, 4)
    program = trace(lambda x: (x.exp().permute(2, 0, 1).sin(), x.sin()), x)
    divided = in_chunks(program, Stretch(0, len(program.calls), 3))
    found = ChunkedCode(divided, emit)(x)
    assert [value.stride() for value in found] == [value.stride() for value in program.run(x)]
    torch.testing.assert_close(found, list(program.run(x)))


def test_a_batch_norm_s_scale_is_in_the_weights_once_for_all_chunks():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    warm_up_statistics(model)
    model.eval().half().to(memory_format=torch.channels_last)
    x = torch.randn(4, 8, 8, 8).half().to(memory_format=torch.channels_last)
    program = capture(model, x)
    count = next(k for k, n in enumerate(program.calls) if n.target is torch.ops.aten.relu.default) + 1
    divided = in_chunks(program, Stretch(0, count, 4))
    fused = fused_convolution.fuse_convolutions(divided)
    names = [str(node.target) for node in fused.calls]
    assert names.count("memopt.convolution_relu.default") == 4
    assert names.count("prims.convert_element_type.default") == 2  # the weight, widened and narrowed, once
    code = ChunkedCode(fused, emit)
    assert [piece.chunk and piece.chunk.index for piece in pieces_of(code)] == [None, 0, 1, 2, 3, None]
    (found,) = code(*given(fused, x))
    torch.testing.assert_close(found, run(program, x)[0], rtol=1e-2, atol=1e-2)


def test_chunks_that_read_each_other_are_not_cut():
    program = trace(lambda x: (x.exp().sin(),), torch.randn(4, 8)).copy()
    first, second = program.calls
    mark(first, Chunk("a", 0))
    mark(second, Chunk("a", 1))
    forget_inplace(program.graph)
    with pytest.raises(NotInPieces, match="several chunks"):
        ChunkedCode(program.finish(), emit)


def test_marks_outlive_copies():
    program = in_chunks(trace(lambda x: (x.exp(),), torch.randn(4, 8)), Stretch(0, 1, 2))
    copied = program.copy()
    assert [chunk_of(node) for node in copied.calls] == [chunk_of(node) for node in program.calls]
    assert {mark.index for node in copied.calls if (mark := chunk_of(node)) is not None} == {0, 1, None}


def test_the_engine_s_prediction_is_the_smaller_of_both():
    program = trace(lambda x: (x.repeat(1, 16).sin().cos().exp().amax(1).exp().sin(),), torch.randn(64, 512))
    divided = in_chunks(program, Stretch(0, 3, 4))
    alone, both = InductorBackend(), InductorBackend(beside=StaticBackend())
    assert alone.timeline(divided).peak_bytes == minimum_timeline(divided).peak_bytes
    assert alone.timeline(program).peak_bytes == timeline(program).peak_bytes
    assert both.timeline(program).peak_bytes == StaticBackend().timeline(program).peak_bytes
    assert both.timeline(divided).peak_bytes <= alone.timeline(divided).peak_bytes


@pytest.mark.usefixtures("_compiler")
def test_inductor_compiles_a_stretch_once_and_lets_go_of_what_it_is_given():
    x = torch.randn(32, 3, 8, 8)
    model = two_stages()
    program = capture(model, x)
    divided = in_chunks(program, Stretch(0, 4, 8))
    function = InductorInference().bind(divided)
    assert isinstance(function._code, ChunkedCode) and function._code.functions == 2
    values = [*given(divided, x)]
    with torch.no_grad():
        torch.testing.assert_close(function(list(values))[0], model(x), rtol=1e-5, atol=1e-5)
        again = torch.randn_like(x)
        torch.testing.assert_close(function([*values[:-1], again])[0], model(again), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("_compiler")
def test_a_piece_writes_to_its_last_inputs():
    program = in_chunks(trace(lambda x: (x.exp().sin(),), torch.randn(4, 8)), Stretch(0, 2, 2))
    x = torch.randn(4, 8)
    for _ in range(2):  # the second time from Inductor's caches
        code = ChunkedCode(program, _lowered_boxed)
        torch.testing.assert_close(code(x)[0], x.exp().sin())
        assert code.functions == 1
        given = [x[:2], torch.empty(2, 8)]
        assert len(code._calls[0].run(given)) == 0 and given == []


@pytest.mark.long
@pytest.mark.usefixtures("_compiler")
def test_a_budget_that_only_chunks_keep_is_kept_by_inductor_code():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = nn.Linear(64, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 8)

        def forward(self, x):
            return self.last(self.second(self.first(x).sin()).cos())

    model, x = Wide().eval(), torch.randn(2048, 64)
    with torch.no_grad():
        free = memopt.compile(model, backend="inductor")
        free(x)
        weights = free.report.breakdown.parameters + free.report.breakdown.inputs
        budget = weights + (free.report.peak_bytes - weights) // 2
        torch._dynamo.reset()
        compiled = memopt.compile(model, budget, backend="inductor")
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert compiled.report.backend == "inductor" and (compiled.report.measured_peak_bytes or 0) <= budget
    assert any("chunks of the batch of 2048" in note for note in compiled.report.notes)


@pytest.mark.gpu
def test_chunks_of_convolutions_in_one_cuda_graph_keep_a_budget():
    width = 64
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AvgPool2d(8), nn.Conv2d(width, 8, 1), nn.Flatten()).eval().half().cuda()
    x = torch.randn(64, 3, 128, 128, device="cuda", dtype=torch.float16)
    one = 64 * width * 128 * 128 * 2  # bytes of a wide value: any plan for the whole batch holds two
    with torch.no_grad():
        expected = model.double()(x.double())
        model.half()
        budget, others = 2 * x.nbytes + one, pooled_bytes(x.device)  # graphs of other tests, where some are there still
        compiled = memopt.compile(model, budget)
        compiled(x)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found = compiled(x)
        assert torch.cuda.max_memory_reserved() - others <= budget
    assert any("chunks of the batch of 64" in note for note in compiled.report.notes)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
