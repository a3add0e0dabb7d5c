"""ChunkLoss: losses and gradients beside float64, nothing as large as the logits left, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table

from memopt.memory.aliasing import analyse
from memopt.memory.timeline import timeline
from memopt.passes.chunk_loss import ChunkLoss
from memopt.passes.eliminate_copies import EliminateCopies
from memopt.program import Phase
from tests.passes.build import arguments, capture_joint, reasons
from tests.support import apply

ROWS, WIDTH, COLUMNS = 48, 8, 40
FORMS = {"fused": None, "decomposed": select_decomp_table()}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def data(dtype=torch.float32, *, bias=True, ignored=True, rows=(ROWS,), columns=COLUMNS):
    """Hidden states, weight, bias and labels of a linear layer with a cross-entropy."""
    torch.manual_seed(0)
    x = torch.randn(*rows, WIDTH).to(dtype).requires_grad_()
    weight = torch.randn(columns, WIDTH).to(dtype).requires_grad_()
    labels = torch.randint(0, columns, rows)
    if ignored:
        labels[..., ::3] = -100
    vector = torch.randn(columns).to(dtype).requires_grad_() if bias else torch.zeros(())
    return x, weight, vector, labels


def shifted(logits, labels):
    """Hugging Face's loss of causal models: upcast, labels padded and shifted, rows flattened."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.view(-1))


LOSSES = {
    "mean": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t),
    "sum": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, reduction="sum"),
    "none": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, reduction="none").square().mean(),
    "tokens": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, reduction="sum") / (t != -100).sum(),
    "class_weights": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, b.detach().abs() + 0.1),
    "smoothing": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, label_smoothing=0.1),
    "upcast": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).float(), t),
    "capped": lambda x, w, b, t: F.cross_entropy(torch.tanh(F.linear(x, w, b) / 30) * 30, t),
    "separate_bias": lambda x, w, b, t: F.cross_entropy(x @ w.t() + b, t),
    "z_loss": lambda x, w, b, t: F.cross_entropy(y := F.linear(x, w, b), t) + 1e-2 * y.logsumexp(-1).square().mean(),
    "scaled": lambda x, w, b, t: F.cross_entropy(F.linear(x.tanh(), w * 0.5, b), t) * 3,
    "gathered": lambda x, w, b, t: -F.linear(x, w, b).log_softmax(-1).gather(-1, t.clamp_min(0).unsqueeze(-1)).mean(),
}


def results(program, tensors):
    wanted = [node.meta["val"].dtype for node in program.placeholders]
    values = [value.to(dtype) for value, dtype in zip(arguments(program, *tensors), wanted, strict=True)]
    torch.manual_seed(0)
    return program.run(*values)


def assert_as_exact(result, before, tensors, exact):
    """Each output's float64 error is at most twice what it was before, or a few units in the last place."""
    found, plain = results(result.program, tensors), results(before, tensors)
    reference = results(exact, tensors)
    for new, old, true in zip(found, plain, reference, strict=True):
        if old is None:
            assert new is None
            continue
        assert (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
        floor = 4 * torch.finfo(old.dtype).eps * true.abs().max()
        assert (new - true).abs().max() <= 2 * (old - true).abs().max() + floor


def products_of(program):
    return [n for n in program.calls if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)]


def largest(program):
    """Bytes of the largest storage that the program makes."""
    return max(s.nbytes for s in analyse(program).storages if s.producer.op == "call_function")


@pytest.mark.quick(
    "torch.float32-*-decomposed",
    "torch.float32-smoothing-fused",
    "torch.float32-gathered-fused",
    "torch.float32-z_loss-fused",
    "torch.bfloat16-mean-*",
    "torch.float16-mean-*",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradients_beside_float64(name, form, dtype):
    tensors = data(dtype)
    exact = capture_joint(
        LOSSES[name], *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors)
    )
    before = capture_joint(LOSSES[name], *tensors, decompositions=FORMS[form])
    result = apply(ChunkLoss(3), before)
    (change,) = result.changes
    assert change.summary.endswith("and its loss in 3 chunks of 16 rows")
    assert result.refusals == ()
    assert_as_exact(result, before, tensors, exact)
    assert largest(before) >= ROWS * COLUMNS * dtype.itemsize
    assert largest(result.program) < ROWS * COLUMNS * dtype.itemsize
    assert timeline(result.program).peak_bytes < timeline(before).peak_bytes


RETURNED = {
    "logits": lambda x, w, b, t: ((y := F.linear(x, w, b)), F.cross_entropy(y, t)),
    "after the loss": lambda x, w, b, t: (F.cross_entropy(y := F.linear(x, w, b), t), y),
    "upcast": lambda x, w, b, t: (F.cross_entropy(y := F.linear(x, w, b).float(), t), y),
    "before the upcast": lambda x, w, b, t: (F.cross_entropy((y := F.linear(x, w, b)).float(), t), y),
    "both": lambda x, w, b, t: (F.cross_entropy((y := F.linear(x, w, b)).float(), t), y, y.float() * 2),
    "detached": lambda x, w, b, t: (F.cross_entropy(y := F.linear(x, w, b), t), y.detach()),
    "probabilities": lambda x, w, b, t: (F.cross_entropy(y := F.linear(x, w, b), t), y.softmax(-1)),
    "smoothing": lambda x, w, b, t: (F.cross_entropy(y := F.linear(x, w, b), t, label_smoothing=0.1), y),
    "scaled": lambda x, w, b, t: (F.cross_entropy((y := F.linear(x, w, b)) / 2.0, t) * 3, y.view(2, -1, COLUMNS)),
}


@pytest.mark.quick("torch.float32-*", "torch.bfloat16-*upcast-decomposed", "torch.bfloat16-both-fused")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_logits_that_are_returned_beside_the_loss_stay_whole(name, form, dtype):
    tensors = data(dtype)
    exact = capture_joint(
        RETURNED[name], *(t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors)
    )
    before = capture_joint(RETURNED[name], *tensors, decompositions=FORMS[form])
    result = apply(ChunkLoss(3), before)
    assert len(result.changes) == 1 and not result.refusals, reasons(result)
    assert_as_exact(result, before, tensors, exact)
    assert len(products_of(result.program)) == len(products_of(before)) + 4, "chunks read the logits that there are"
    assert timeline(result.program).peak_bytes < timeline(before).peak_bytes


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_sequences_with_hugging_face_s_shifted_loss(form):
    tensors = data(torch.bfloat16, bias=False, rows=(4, 12))

    def loss(x, weight, _, labels):
        return shifted(F.linear(x * 2, weight), labels)

    before = EliminateCopies().run(capture_joint(loss, *tensors, decompositions=FORMS[form])).program
    exact = capture_joint(
        loss, tensors[0].detach().double().requires_grad_(), tensors[1].detach().double().requires_grad_(), *tensors[2:]
    )
    result = apply(ChunkLoss(), before)
    assert [change.summary.split(" ", 1)[1] for change in result.changes] == ["and its loss in 4 chunks of 12 rows"]
    wide = [
        n for n in before.calls if isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].shape == (4, 12, COLUMNS)
    ]
    assert wide, "a value over [batch, sequence, vocabulary] stands in the graph"
    assert_as_exact(result, before, tensors, exact)
    assert largest(result.program) < ROWS * COLUMNS * 2


def test_a_tied_weight_gets_both_gradients():
    x, weight, _, labels = data(bias=False, ignored=False)
    ids = labels.flip(0)

    def loss(x, weight, ids, labels):
        return F.cross_entropy(F.linear(x * F.embedding(ids, weight), weight), labels)

    before = capture_joint(loss, x, weight, ids, labels)
    exact = capture_joint(
        loss, x.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), ids, labels
    )
    result = apply(ChunkLoss(), before)
    assert_as_exact(result, before, (x, weight, ids, labels), exact)


def test_a_weight_that_is_not_transposed():
    x, weight, bias, labels = data()
    weight = weight.detach().t().contiguous().requires_grad_()

    def loss(x, weight, bias, labels):
        return F.cross_entropy(torch.addmm(bias, x, weight), labels)

    before = capture_joint(loss, x, weight, bias, labels)
    double = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    result = apply(ChunkLoss(), before)
    assert_as_exact(result, before, (x, weight, bias, labels), capture_joint(loss, *double, labels))
    assert largest(result.program) < ROWS * COLUMNS * 4


def test_frozen_parts_get_no_gradient():
    x, weight, bias, labels = data()
    for frozen in ({0}, {1, 2}, {2}):
        tensors = [t.detach().requires_grad_(i not in frozen) for i, t in enumerate((x, weight, bias))]
        before = capture_joint(LOSSES["mean"], *tensors, labels)
        double = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
        result = apply(ChunkLoss(), before)
        assert_as_exact(result, before, (*tensors, labels), capture_joint(LOSSES["mean"], *double, labels))


def test_two_losses_in_one_step():
    x, weight, bias, labels = data()

    def loss(x, weight, bias, labels):
        one = F.cross_entropy(F.linear(x, weight, bias), labels)
        return one + F.cross_entropy(F.linear(x.tanh(), weight), labels.flip(0))

    before = capture_joint(loss, x, weight, bias, labels)
    double = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    result = apply(ChunkLoss(), before)
    assert len(result.changes) == 2
    assert_as_exact(result, before, (x, weight, bias, labels), capture_joint(loss, *double, labels))
    assert largest(result.program) < ROWS * COLUMNS * 4


def test_chunks_whose_labels_are_all_ignored_and_rows_that_do_not_divide():
    x, weight, bias, labels = data()
    labels[:20] = -100
    before = capture_joint(LOSSES["mean"], x, weight, bias, labels)
    double = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = capture_joint(LOSSES["mean"], *double, labels)
    for chunks in (2, 5, 7, 48):
        result = apply(ChunkLoss(chunks), before)
        assert_as_exact(result, before, (x, weight, bias, labels), exact)
    labels[:] = -100
    loss = results(result.program, (x, weight, bias, labels))[0]
    assert loss.isnan() and results(before, (x, weight, bias, labels))[0].isnan()


def test_the_number_of_chunks():
    torch.manual_seed(0)
    weight, labels = torch.randn(4096, 16, requires_grad=True), torch.randint(0, 4096, (2048,))
    x = torch.randn(2048, 16, requires_grad=True)
    program = capture_joint(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x, weight, labels)
    found = {chunks: ChunkLoss(chunks).run(program).changes[0].summary for chunks in (None, 2, 3)}
    assert found == {
        None: "mm and its loss in 16 chunks of 128 rows",
        2: "mm and its loss in 2 chunks of 1024 rows",
        3: "mm and its loss in 3 chunks of 683 rows",
    }
    assert timeline(ChunkLoss().run(program).program).peak_bytes < 0.2 * timeline(program).peak_bytes
    with pytest.raises(ValueError, match="at least 2"):
        ChunkLoss(1)


def test_chunks_of_twice_as_many_rows():
    torch.manual_seed(0)
    weight, labels = torch.randn(4096, 16, requires_grad=True), torch.randint(0, 4096, (2048,))
    x = torch.randn(2048, 16, requires_grad=True)
    program = capture_joint(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x, weight, labels)
    (larger,) = ChunkLoss().others
    assert (larger.name, larger.key, ChunkLoss().key) == ("chunk_loss", "chunk_loss*2", "chunk_loss")
    assert larger.run(program).changes[0].summary == "mm and its loss in 8 chunks of 256 rows"
    assert larger.others == ChunkLoss(4).others == ()
    smaller = ChunkLoss().deeper
    assert smaller is not None and smaller.key == "chunk_loss/4" and smaller.others == ()
    assert smaller.deeper is ChunkLoss(4).deeper is None
    assert ChunkLoss(larger=16).run(program).changes[0].summary.endswith("2 chunks of 1920 rows")
    for wrong in ({"larger": 0}, {"waiting": 0}):
        with pytest.raises(ValueError, match="at least one"):
            ChunkLoss(**wrong)


def test_the_change_names_what_it_replaced():
    tensors = data()
    before = EliminateCopies().run(capture_joint(LOSSES["mean"], *tensors)).program
    (change,) = apply(ChunkLoss(), before).changes
    assert change.before == ("addmm", "_log_softmax", "nll_loss_forward", "nll_loss_backward",
                             "_log_softmax_backward_data", "mm", "mm_1", "sum_1")  # fmt: skip
    assert change.after[0].startswith("nll_loss_forward") and len(change.after) == 4


AHEAD = ("mean", "sum", "tokens", "class_weights", "upcast", "capped", "separate_bias", "scaled")


@pytest.mark.quick("*-decomposed", "mean-fused", "smoothing-fused")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_computed_with_the_loss_where_they_are_proportional_to_its_own(name, form):
    for dtype in DTYPES:
        program = apply(ChunkLoss(3), capture_joint(LOSSES[name], *data(dtype), decompositions=FORMS[form])).program
        products = products_of(program)
        ahead = dtype is not torch.float16 and (name in AHEAD or (name, form) == ("smoothing", "decomposed"))
        assert len(products) == (9 if ahead else 12)  # with logits that are recomputed
        assert {n.meta["phase"] for n in products} == ({Phase.FORWARD} if ahead else set(Phase))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w, b, t, s: F.cross_entropy(F.linear(x, w, b), t) * s,
        lambda x, w, b, t, s: ((y := LOSSES["mean"](x, w, b, t)), LOSSES["class_weights"](x, w, b, t) * y.detach()),
        lambda x, w, b, t, s: F.cross_entropy(F.linear(x, w, b), t, reduction="none") * s,
        lambda x, w, b, t, s: F.cross_entropy(F.linear(x, w, b), t) ** 2,
        lambda x, w, b, t, s: F.cross_entropy(Clipped.apply(F.linear(x, w, b)), t),
    ],
    ids=["scaled by an input", "two losses of one product", "not reduced", "squared", "clipped"],
)
def test_whatever_else_backward_adds_gradients_are_as_exact(loss):
    tensors = (*data(), torch.tensor(3.0))
    double = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]
    before = capture_joint(loss, *tensors)
    result = apply(ChunkLoss(3), before)
    assert_as_exact(result, before, tensors, capture_joint(loss, *double))


class Clipped(torch.autograd.Function):
    """A gradient that is not proportional to the loss's own."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


def test_gradients_with_dropout_pass_a_finite_difference_check():
    x, weight, bias, labels = data(torch.float64)

    def loss(x, weight, bias, labels):
        return F.cross_entropy(F.linear(F.dropout(x, 0.3).tanh(), weight, bias), labels)

    program = apply(ChunkLoss(5), capture_joint(loss, x, weight, bias, labels)).program
    _, *gradients = results(program, (x, weight, bias, labels))
    tangent = arguments(program, x, weight, bias, labels)[-1]
    for position, (value, gradient) in enumerate(zip((x, weight, bias), gradients, strict=False)):
        direction = torch.randn_like(value)
        ends = []
        for size in (1e-5, -1e-5):
            moved = [x, weight, bias, labels]
            moved[position] = value.detach() + size * direction
            ends.append(results(program, moved)[0])
        slope = (ends[0] - ends[1]) / 2e-5
        torch.testing.assert_close((gradient * direction).sum(), slope * tangent.double(), rtol=1e-6, atol=1e-9)
