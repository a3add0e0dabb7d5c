"""Where Inductor keeps its files, and what it needs."""

from torch._inductor import cpp_builder, exc
from torch.utils import _triton

from memopt.torch_compat.inductor_files import files_by_default, has_cpp_compiler, has_triton


def test_no_variable_names_the_folder(monkeypatch):
    before = files_by_default()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert files_by_default() == before != "/elsewhere"


def test_what_is_missing_is_said(monkeypatch):
    def fails():
        raise exc.InvalidCxxCompiler

    for value in (True, False):
        monkeypatch.setattr(_triton, "has_triton", lambda value=value: value)
        assert has_triton() is value
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    assert has_cpp_compiler()
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fails)
    assert not has_cpp_compiler()
