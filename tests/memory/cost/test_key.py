"""What tells operators apart, and machines."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from memopt.memory.cost import key
from memopt.memory.cost.key import key_of, place_of, processor_name
from tests.memory.cost.build import aten, call
from tests.support import capture

ROOT = Path(__file__).resolve().parents[3]


def test_what_tells_operators_apart():
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    keys = [
        key_of(call(*case))
        for case in [
            (aten.mul.Tensor, x, y),
            (aten.mul.Tensor, x, x),
            (aten.mul.Tensor, x, y.t()),
            (aten.mul.Tensor, x, 2),
            (aten.mul.Tensor, x, 2.0),
            (aten.mul.Tensor, x, True),
            (aten.mul.Tensor, x.double(), y.double()),
            (aten.mul.Tensor, x, y[:1]),
            (aten.add.Tensor, x, y),
        ]
    ]
    assert len(set(keys)) == len(keys)
    assert key_of(call(aten.mul.Tensor, y, x)) == keys[0]


def test_devices_of_one_kind_are_the_place_s_to_tell_apart():
    first, second = (call(aten.full.default, [2], 1.0, device=torch.device("meta")) for _ in range(2))
    second.kwargs = {"device": torch.device("meta", 1)}
    assert key_of(first) == key_of(second)


def test_keys_are_the_same_in_every_process():
    script = (
        "import torch; from tests.memory.cost.build import aten, call; from memopt.memory.cost.key import key_of;"
        "x = torch.randn(4, 4, dtype=torch.bfloat16);"
        "print(key_of(call(aten.cat.default, [x, x.t()], 1)), key_of(call(aten._to_copy.default, x, dtype=torch.half)))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True, cwd=ROOT).stdout
    x = torch.randn(4, 4, dtype=torch.bfloat16)
    first, second = call(aten.cat.default, [x, x.t()], 1), call(aten._to_copy.default, x, dtype=torch.half)
    assert found == f"{key_of(first)} {key_of(second)}\n"
    assert "torch.bfloat16" in found and "torch.float16" in found and " at 0x" not in found


def test_the_place_names_what_chooses_kernels(monkeypatch):
    cpu = torch.device("cpu")
    plain = place_of(cpu)
    assert torch.__version__ in plain and processor_name() in plain
    assert place_of(cpu) == plain
    monkeypatch.setattr(key, "processor_name", lambda: "another")
    assert place_of(cpu) != plain
    monkeypatch.undo()
    torch.use_deterministic_algorithms(True)
    try:
        assert place_of(cpu) != plain
    finally:
        torch.use_deterministic_algorithms(False)
    assert place_of(cpu) == plain


def test_what_a_rewrite_left_alone_is_not_written_again(monkeypatch):
    program = capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Tanh()), torch.ones(4, 3))
    written, plain = [], key._written
    monkeypatch.setattr(key, "_written", lambda node: written.append(node.name) or plain(node))
    first = [key_of(node) for node in program.calls]
    copy = program.copy()
    assert [key_of(node) for node in copy.calls] == first and len(written) == len(first)
    copy.calls[-1].target = aten.sin.default
    finished = copy.finish()
    assert [key_of(node) for node in finished.calls] == [plain(node) for node in finished.calls] != first
    assert written[len(first) :] == [finished.calls[-1].name]
