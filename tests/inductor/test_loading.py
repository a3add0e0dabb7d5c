"""Modules of graphs go through who asked for them; those of kernels do not."""

from types import SimpleNamespace

import pytest
from torch._inductor import codecache

from memopt.inductor.loading import loaded_by, stand_in


@pytest.fixture
def loads(monkeypatch):
    """Keys of what Inductor has loaded."""
    found = []

    def load(key, path, linemap=None, attrs=None, **options):
        found.append(key)
        return SimpleNamespace(call=lambda args: [*args, key], attrs=attrs, options=options)

    monkeypatch.setattr(codecache.PyCodeCache, "load_by_key_path", load)
    return found


def test_a_graph_is_loaded_when_and_how_it_is_asked_for(loads):
    asked = []

    def taken(load, path, attributes):
        asked.append((load, path, dict(attributes)))
        return stand_in(lambda args: load().call(args), path)

    with loaded_by(taken):
        kernel = codecache.PyCodeCache.load_by_key_path("kernel", "k.py")
        module = codecache.PyCodeCache.load_by_key_path("taken", "h.py", None, {"constant": 3}, set_sys_modules=False)
    assert loads == ["kernel"] and kernel.call([1]) == [1, "kernel"]
    assert [item[1:] for item in asked] == [("h.py", {"constant": 3})]
    assert module.__file__ == "h.py" and module.call([1]) == [1, "taken"]
    loaded = asked[0][0]()
    assert loaded.attrs == {"constant": 3} and loaded.options == {"set_sys_modules": False}


def test_afterwards_inductor_loads_as_before(loads):
    before = codecache.PyCodeCache.load_by_key_path
    with pytest.raises(RuntimeError), loaded_by(lambda *_: None):
        raise RuntimeError
    assert codecache.PyCodeCache.load_by_key_path is before
