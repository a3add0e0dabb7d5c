"""Copies to the host in code of Inductor's: in the graph's order, and known once."""

from memopt.host import operators
from memopt.inductor import host_copies
from memopt.inductor.host_copies import register_host_copies


def test_every_operator_of_copies_is_known_to_inductor_after_one_call():
    from torch._inductor.lowering import lowerings

    register_host_copies()
    for operator in (operators.TO_HOST, operators.FETCH, operators.LANDED, operators.ARRIVED):
        assert operator in lowerings
    before = {operator: lowerings[operator] for operator in lowerings}
    register_host_copies()
    assert all(lowerings[operator] is lowering for operator, lowering in before.items())


def test_what_waits_is_a_write_to_what_was_copied(monkeypatch):
    called = []
    monkeypatch.setattr(host_copies, "call", lambda *args: called.append(args))
    held, value = object(), object()
    assert host_copies._landed(value, held) is held
    assert host_copies._arrived(value, held) is value
    assert called == [(operators.LANDED_INTO, value, held), (operators.ARRIVED_INTO, value, held)]
