"""What operators that compute do to the batch: where it lies in the result, what is sliced, and why not."""

import pytest
import torch
import torch.nn.functional as F

from memopt.patterns.batch import Batched, NotBatched, find_batch
from tests.passes.build import trace

aten = torch.ops.aten
X = torch.randn(4, 3, 6)
IMAGE = torch.randn(4, 3, 6, 6)
SQUARE = torch.randn(4, 4, 6, 6)
WEIGHT = torch.randn(3, 6)  # its first dimension is not the batch's


def batch_of(function, *tensors):
    program = trace(lambda *given: (function(*given),), *tensors)
    batch, last = find_batch(program), program.calls[-1]
    return batch.reasons.get(last) or batch.states[last], batch.rules.get(last)


@pytest.mark.parametrize(
    ("function", "tensors", "expected"),
    [
        (lambda x, w: x + w, (X, WEIGHT), Batched(0)),
        (lambda x: x.relu(), (X,), Batched(0)),
        (lambda x: x.sum(1), (X,), Batched(0)),
        (lambda x: x.transpose(0, 2).sum(0), (X,), Batched(1)),
        (lambda x: x.sum(1, keepdim=True), (X,), Batched(0)),
        (lambda x: x.softmax(-1), (X,), Batched(0)),
        (lambda x: x.argmax(-1), (X,), Batched(0)),
        (lambda x, w: x.view(12, 6) @ w.t(), (X, WEIGHT), Batched(0, 3)),
        (lambda x, w: w @ x.view(12, 6).t(), (X, WEIGHT), Batched(1, 3)),
        (lambda x: torch.bmm(x, x.transpose(1, 2)), (X,), Batched(0)),
        (lambda x, w: F.conv2d(x, w), (IMAGE, torch.randn(2, 3, 3, 3)), Batched(0)),
        (lambda x: F.avg_pool2d(x, 2), (IMAGE,), Batched(0)),
        (lambda x: F.pad(x, (1, 1)), (IMAGE,), Batched(0)),
        (lambda x: F.interpolate(x, 9, mode="linear"), (X,), Batched(0)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"), (IMAGE,), Batched(0)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True), (IMAGE,), Batched(0)),
        (lambda x: F.pixel_unshuffle(x, 2), (IMAGE,), Batched(0)),
        (lambda x: x.roll((1, 2), (2, -1)), (IMAGE,), Batched(0)),
        (lambda x: x.flip(1), (X,), Batched(0)),
        (lambda x: F.grid_sample(x, x[:, :2, :4, :2], align_corners=False), (IMAGE,), Batched(0)),
        (lambda x: x.tril(), (X,), Batched(0)),
        (lambda i, w: F.embedding(i, w), (torch.zeros(4, 2, dtype=torch.int64), torch.randn(9, 6)), Batched(0)),
        (lambda i, w: w[i], (torch.zeros(4, 2, dtype=torch.int64), torch.randn(9, 6)), Batched(0)),
        (lambda x, i: x.gather(1, i), (X, torch.zeros(4, 1, 6, dtype=torch.int64)), Batched(0)),
    ],
)
def test_the_batch_is_followed(function, tensors, expected):
    assert batch_of(function, *tensors)[0] == expected


@pytest.mark.parametrize(
    ("function", "tensors", "reason"),
    [
        (lambda x: x.sum(), (X,), "reduces over the batch"),
        (lambda x: x.mean(0), (X,), "which is the batch"),
        (lambda x: x.softmax(0), (X,), "which is the batch"),
        (lambda x: x + x.view(12, 6)[:4, None, :], (X,), "of which nothing is known"),
        (lambda x: x.view(4, 18).t() @ x.view(4, 18), (X,), "sums over the batch"),
        (lambda x, w: w @ x.view(4, 18), (X, torch.randn(3, 4)), "sums over the batch"),
        (lambda x: aten.native_layer_norm(x, [4, 3, 6], None, None, 1e-5)[0], (X,), "of which nothing is known"),
        (lambda x: F.batch_norm(x, None, None, training=True), (IMAGE,), "of which nothing is known"),
        (lambda x: aten.native_dropout(x, 0.5, True)[0], (X,), "of which nothing is known"),
        (lambda x: aten.bernoulli.default(x), (X,), "draws random numbers for the whole batch"),
        (lambda i, w: w[i], (torch.zeros(4, dtype=torch.int64), torch.randn(4, 6)), "picks entries out of the batch"),
        (lambda x: F.pad(x.transpose(0, 2), (1, 1)), (X,), "which is the batch"),
        (lambda x: x.roll(1, 0), (X,), "which is the batch"),
        (lambda x: x.roll(1), (X,), "which is the batch"),
        (lambda x: F.interpolate(x.transpose(0, 2), scale_factor=2), (IMAGE,), "the batch in dimension 2"),
        (lambda x: F.pixel_shuffle(x.transpose(0, 1), 2), (torch.randn(4, 3, 4, 4),), "the batch in dimension 1"),
        (lambda x: F.grid_sample(x.transpose(0, 1), x[..., :2], align_corners=False), (SQUARE,), "lie differently"),
    ],
)
def test_what_mixes_samples_is_refused(function, tensors, reason):
    found, _ = batch_of(function, *tensors)
    assert isinstance(found, str) and reason in found


def test_what_has_an_entry_for_each_sample_is_sliced():
    program = trace(lambda x: (x + torch.arange(4.0)[:, None, None],), X)
    batch, add = find_batch(program), program.calls[-1]
    (other,) = [node for node in add.all_input_nodes if node.op == "call_function"]
    assert batch.rules[add].slices == {other: Batched(0)}
    _, rule = batch_of(lambda x, w: x + w, X, WEIGHT)
    assert rule.slices == {}


def test_a_grid_that_all_samples_have_alike_is_sliced():
    theta = lambda: torch.ones(4, 2, 3).sin()  # noqa: E731
    grid = lambda: F.affine_grid(theta(), [4, 3, 2, 2], align_corners=False)  # noqa: E731
    program = trace(lambda x: (F.grid_sample(x, grid(), align_corners=False),), IMAGE)
    batch, sampled = find_batch(program), program.calls[-1]
    assert batch.rules[sampled].slices == {sampled.args[1]: Batched(0)}


def test_statistics_that_eval_mode_does_not_compute_are_not_followed():
    norm = aten._native_batch_norm_legit_no_training
    program = trace(lambda x, m, v: norm(x, None, None, m, v, 0.1, 1e-5)[:2], IMAGE, torch.randn(3), torch.ones(3))
    batch = find_batch(program)
    state, *rest = batch.states[program.calls[0]]
    assert state == Batched(0) and all(isinstance(item, NotBatched) for item in rest)
    assert [node.name for node in batch.reasons] == ["getitem_1", "getitem_2"]


def test_a_group_norm_s_number_of_samples_is_that_of_the_chunk():
    program = trace(lambda x: (F.group_norm(x, 3),), IMAGE)
    (rule,) = [rule for node, rule in find_batch(program).rules.items() if "group_norm" in node.name]
    assert rule.resize(2) == {3: 2}


def test_attention_with_a_mask_for_each_sample():
    q, mask = torch.randn(4, 2, 16, 8), torch.randn(1, 1, 16, 16)
    op = aten._scaled_dot_product_flash_attention_for_cpu
    program = trace(lambda q, m: (op(q, q, q, attn_mask=m.expand(4, 1, 16, 16))[0],), q, mask)
    batch = find_batch(program)
    (attention,) = [node for node in program.calls if "attention" in node.name]
    (expanded,) = [node for node in program.calls if "expand" in node.name]
    assert batch.states[attention][0] == Batched(0) and batch.rules[attention].slices == {expanded: Batched(0)}
