"""Engines by name."""

import pytest
import torch

from memopt.backends.aten import AtenBackend
from memopt.backends.by_name import BACKENDS, engine_of
from memopt.budget import parse_budget

CPU = torch.device("cpu")


def test_an_engine_is_itself():
    engine = AtenBackend()
    assert engine_of(engine, CPU, None) == (engine, ())


@pytest.mark.parametrize("name", ["aten", "static"])
def test_an_engine_has_its_name_and_needs_no_note(name):
    engine, notes = engine_of(name, CPU, None)
    assert type(engine).__module__.endswith(name) and notes == ()


def test_without_a_compiler_the_next_best_is_taken_and_said(monkeypatch, caplog):
    monkeypatch.setattr("memopt.backends.inductor.missing_compiler", lambda device: "no C++ compiler")
    engine, notes = engine_of(None, CPU, None)
    assert type(engine).__name__ == "AtenOrStaticBackend" and "no C++ compiler" in notes[0]
    engine, notes = engine_of("inductor", CPU, None)
    assert isinstance(engine, AtenBackend) and notes[0] in caplog.text


def test_a_name_that_no_engine_has_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=f"unknown backend 'gcc': use one of {BACKENDS[0]}, "):
        engine_of("gcc", CPU, None)


def test_tensorflow_keeps_no_budget():
    with pytest.raises(ValueError, match="keeps no budget"):
        engine_of("tensorflow", CPU, parse_budget("1GB"))
