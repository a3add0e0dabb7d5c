"""What Inductor's generated code takes, known before a kernel is compiled: its wrapper run on fake tensors.

The wrapper that Inductor writes allocates, reuses and deletes every buffer in plain Python. Run with its kernels left
out and its tensors fake, it shows the true lifetimes: fusion, reordering, in-place reuse and views are all in it.
"""

from __future__ import annotations

import ast
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from memopt.host.operators import TO_HOST
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.fake_tensors import FakeTensor, FakeTensorMode
from memopt.torch_compat.storages import id_of_storage, storage_id

# Bytes that a call takes beyond its results, by operator, positional and keyword arguments, and results; or what tells
# them once the code was followed.
Workspace = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], int | Callable[[], int]]


class ReplayError(RuntimeError):
    """The generated code could not be followed; the message names the line."""


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One generated wrapper.

    Attributes:
        source: its Python source.
        attributes: what Inductor adds to the module's namespace: constants of the graph.
    """

    source: str
    attributes: Mapping[str, Any]


def _ran(call: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
    return call(arguments)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that appear while it is entered, until they die, but of what is on the host.

    Attributes:
        live: bytes now.
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self._peak = 0
        self._known: dict[int, int] = {}
        self._workspace = workspace
        self._told_later: list[tuple[int, Callable[[], int]]] = []  # calls, with the bytes that were alive at each

    @property
    def peak(self) -> int:
        """The most bytes since `mark` was called, operators' workspace included."""
        self.settle()
        return self._peak

    def settle(self) -> None:
        """Ask for what was to be told later."""
        told, self._told_later = self._told_later, []
        self._peak = max(self._peak, *(live + workspace() for live, workspace in told), 0)

    def mark(self) -> None:
        """Forget the peak so far."""
        self._peak, self._told_later = self.live, []

    def ignore(self, values: Any) -> None:
        """Leave the storages of these tensors out of the count: they are there already."""
        for leaf in _tensors(values):
            self._known.setdefault(storage_id(leaf), 0)

    def add(self, values: Any, *, on_host: bool = False) -> None:
        """Count the storages of these tensors that are not known yet; those on the host take nothing."""
        for leaf in _tensors(values):
            storage = leaf.untyped_storage()
            key = id_of_storage(storage)
            if key not in self._known:
                self._known[key] = 0 if on_host else allocated_bytes(storage.nbytes(), leaf.device)
                self.live += self._known[key]
                weakref.finalize(storage, self._drop, key)
        self._peak = max(self._peak, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(result, on_host=func is TO_HOST)
        self.call(func, args, kwargs, result)
        return result

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count what an operator takes while it runs, beyond its results."""
        if self._workspace is None:
            return
        taken = self._workspace(func, args, kwargs, result)
        if isinstance(taken, int):
            self._peak = max(self._peak, self.live + taken)
        else:
            self._told_later.append((self.live, taken))


def replay(
    wrapper: Wrapper,
    arguments: list[Any],
    mode: FakeTensorMode,
    meter: Meter,
    run: Callable[[Any, list[Any]], Any] = _ran,
) -> list[Any]:
    """Run a wrapper on fake arguments and return its results, fake as well.

    Args:
        wrapper: the generated code.
        arguments: fake tensors and plain numbers; the list is emptied, as the wrapper frees what it reads last.
        mode: the fake mode of the arguments.
        meter: what counts.
        run: calls what the wrapper names `call` with the arguments.

    Raises:
        ReplayError: something in the code is not understood.
    """
    try:
        namespace = _load(wrapper, {**_STUBS, "extern_kernels": _ExternKernels(meter)})
        with torch.no_grad(), mode, meter:
            return list(run(namespace["call"], arguments))
    except Exception as error:  # whatever generated code may raise
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ReplayError(f"Inductor's code cannot be followed ({type(error).__name__}: {reason})") from error


def _load(wrapper: Wrapper, stubs: Mapping[str, Any]) -> dict[str, Any]:
    tree = ast.parse(wrapper.source)
    kernels: list[str] = []
    kept: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _calls_async_compile(statement.value):
            kernels += [target.id for target in statement.targets if isinstance(target, ast.Name)]
        elif not _mentions_async_compile(statement):
            kept.append(statement)
    tree.body = kept
    namespace: dict[str, Any] = {"__name__": "memopt_replay"}
    exec(compile(tree, "<inductor wrapper>", "exec"), namespace)
    namespace.update(wrapper.attributes)
    namespace.update({name: _Kernel() for name in kernels}, **stubs)
    return namespace


def _calls_async_compile(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and _mentions_async_compile(value.func)


def _mentions_async_compile(tree: ast.AST) -> bool:
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return not isinstance(tree, (ast.ClassDef, ast.FunctionDef)) and any(
        name in ("async_compile", "AsyncCompile") for name in names
    )


class _Kernel:
    """Stands for a compiled kernel, which writes into buffers that the wrapper made."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    run = __call__


class _ExternKernels:
    """Stands for Inductor's library calls: with `out=` they make no buffer, else they are ATen's own operators."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        packet: Any = getattr(torch.ops.aten, name, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if "out" not in kwargs:
                if packet is None:
                    raise ReplayError(f"extern kernel {name} is not known")
                return packet(*args, **kwargs)
            out = kwargs.pop("out")
            if packet is not None:
                self._meter.call(packet.default, args, kwargs, out)
            return out

        return call


def _empty(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# Names of the wrapper's namespace whose own meanings need real tensors or a device.
_STUBS: dict[str, Any] = {
    "empty_strided_cpu": _empty("cpu"),
    "empty_strided_cpu_pinned": _empty("cpu"),
    "empty_strided_cuda": _empty("cuda"),
    "reinterpret_tensor": _reinterpret,
    "assert_size_stride": _nothing,
    "assert_alignment": _nothing,
    "copy_if_misaligned": lambda tensor: tensor,  # as torch.compile finds its inputs
    "run_intermediate_hooks": _nothing,
    "get_raw_stream": lambda device: 0,
}


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor))
