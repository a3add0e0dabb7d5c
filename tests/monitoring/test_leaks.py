"""Tensors of which each step leaves more, to the byte; and what is none of them."""

import torch

import memopt
from tests.monitoring.loops import BATCH, WIDTH, Net, trained

ROW = BATCH * WIDTH * 4  # bytes of one float32 tensor of the batch's


def test_kept_outputs_are_a_leak_of_so_many_bytes():
    kept = []
    with memopt.monitor(device="cpu") as m:
        trained(7, lambda out, loss: kept.append(out.detach()))
    (leak,) = m.leaks
    assert (leak.tensors.count, leak.tensors.bytes, leak.steps) == (7, 7 * ROW, 7)
    assert leak.bytes_per_step == ROW == m.drift_bytes
    assert leak.tensors.shape == (BATCH, WIDTH) and leak.tensors.dtype == "float32" and not leak.in_graph
    assert leak.tensors.module == "layers.1" and "return x + self.down" in leak.tensors.line
    assert "layers.1" in str(m) and "leaks" in str(m)


def test_kept_losses_keep_their_graphs():
    model, kept = Net(), []
    with memopt.monitor(device="cpu") as m:
        for _ in range(6):
            kept.append(model(torch.randn(BATCH, WIDTH)).square().mean())
            m.step()
    saved = {(leak.tensors.module, leak.tensors.operator): leak for leak in m.leaks if leak.in_graph}
    assert saved["layers.0", "aten.relu"].tensors.bytes == 6 * 4 * ROW
    assert saved["layers.0", "aten.add"].tensors.bytes == saved["layers.1", "aten.add"].tensors.bytes == 6 * ROW
    (losses,) = (leak for leak in m.leaks if not leak.in_graph)
    assert losses.tensors.shape == () and losses.tensors.count == 6 and "kept.append" in losses.tensors.line
    # All that grows is named: saved results of both blocks, the inputs, the losses.
    assert sum(leak.bytes_per_step for leak in m.leaks) == m.drift_bytes


def test_what_goes_after_some_steps_is_no_leak():
    window = []

    def each(out, loss):
        window.append(out.detach())
        del window[:-3]

    with memopt.monitor(device="cpu") as m:
        trained(12, each)
    assert m.leaks == () and m.drift_bytes == 0


def test_an_optimizer_s_state_is_no_leak():
    with memopt.monitor(device="cpu") as m:
        trained(5)
        assert m.leaks == ()  # within the block, too
    assert m.leaks == ()
