"""Tables of what was seen."""

from memopt.monitoring.record import Filled, Leak, OutOfMemory, StepMemory, TensorGroup
from memopt.monitoring.text import SHOWN, filled_lines, leak_lines, short_lines, some, step_head, step_row

GROUP = TensorGroup(3, 3_000_000, (250, 1000), "float32", "forward", "layers.*", "net.py:7, x = f(x)", "aten.mm")


def test_steps_have_what_was_reserved_only_where_it_is_known():
    step, cuda = StepMemory(0, 1, 2, 3, 0.5), StepMemory(0, 1, 2, 3, 0.5, 10, 8)
    assert len(step_head([step])) == len(step_row(step)) == 5
    assert step_head([cuda])[4:6] == ("reserved", "lost") and step_row(cuda)[4:6] == ("10 B", "8 B")


def test_of_many_steps_the_ends_and_the_highest_are_shown():
    steps = [StepMemory(n, 0, 100 if n in (30, 31) else n, 0, 0.1) for n in range(60)]
    shown = [step.number for step in some(steps)]
    assert shown[:4] == [0, 1, 2, 3] and shown[-4:] == [56, 57, 58, 59] and {30, 31} <= set(shown) and len(shown) == 12


def test_leaks():
    assert leak_lines([]) == ["no leak: no step left tensors that later steps added to"]
    lines = leak_lines([Leak(GROUP, 3, True)] * (SHOWN + 2))
    assert "3.00 MB  1.00 MB" in lines[2] and "a graph holds it" in lines[2] and lines[-1] == "and 2 more of them"


def test_a_moment_of_too_little_memory():
    filled = Filled(5_000_000, (GROUP,) * (SHOWN + 1), 7_000)
    moment = OutOfMemory("no room", 3, "backward", "layers.1", "train.py:4, go()", filled, 8_000_000, 1_000_000,
                         10_000_000, ("do this",))  # fmt: skip
    text = "\n".join(short_lines(moment))
    assert text.startswith("memory ran out in step 3, backward in layers.1: no room\n  at train.py:4, go()\n")
    assert "of 10.00 MB: 5.00 MB tensors, 3.00 MB reserved and unused, 1.00 MB not PyTorch's" in text
    assert "and 3 smaller tensors, 3.00 MB" in text and "7.00 kB that no tensor shows" in text
    assert text.endswith("the cheapest first:\n    - do this")
    assert filled_lines(Filled(0, ())) == []
