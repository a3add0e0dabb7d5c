"""Writing an ONNX file whole or not at all: nothing stands under its name before it is complete and verified."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import onnx_ir as ir

from memopt.convert.onnx_file import external_files
from memopt.onnx.infer import without_inferred
from memopt.onnx.read import weight_bytes

log = logging.getLogger(__name__)

# A protobuf message must stay below 2 GiB: with weights above this they go to a file of their own.
SINGLE_FILE_BYTES = 1_800_000_000
_CHUNK = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Staged:
    """A model that is complete, but not yet under its name.

    Attributes:
        runnable: what a runtime loads: the file's bytes or, where weights lie beside it, its temporary path.
        file_bytes: of the model's file and of the weights beside it.
        commit: put it under its name.
    """

    runnable: bytes | Path
    file_bytes: int
    commit: Callable[[], None]


@contextlib.contextmanager
def staged(model: ir.Model, output: Path, *, external_above: int = SINGLE_FILE_BYTES) -> Iterator[Staged]:
    """Serialize the model; on leaving, whatever was not committed is gone.

    Shapes of inner values that ONNX's inference finds again are left out of the file.
    Weights of more than `external_above` bytes are streamed, one tensor at a time, to a file beside the model's.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    remove_leftovers(output)
    size, model = weight_bytes(model), without_inferred(model)
    if size <= external_above:
        payload = ir.to_proto(model).SerializeToString()
        yield Staged(payload, len(payload), lambda: write_whole(output, payload))
        return
    folder, lock = _own_folder(output)
    try:
        with signals_raise():
            data = _data_name(output)
            ir.save(model, folder / output.name, external_data=data)
            total = sum(file.stat().st_size for file in folder.iterdir())
            yield Staged(folder / output.name, total, lambda: _move(folder, data, output))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _own_folder(output: Path) -> tuple[Path, int]:
    """A new hidden folder beside the output, and the descriptor that says that it is in use, as long as it is open."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.{os.getpid()}.", dir=output.parent))
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():  # else another process took it for a leftover, in the moment before it was locked
            return folder, lock
        os.close(lock)


def write_whole(path: Path, payload: bytes) -> None:
    """Write a file so that a reader finds either the old one or the whole new one, even if the process is killed.

    On Linux the file has no name before it is complete, so that not even a temporary one can be left behind.

    Raises:
        OSError: the folder cannot be written to, or is full; nothing is left behind.
    """
    unnamed = _open_unnamed(path.parent)
    if unnamed is None:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.{os.getpid()}.", dir=path.parent)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
    else:
        handle, temporary = unnamed, f"{path.parent}/.{path.name}.{os.getpid()}.{secrets.token_hex(8)}"
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            view = memoryview(payload)
            for start in range(0, len(view), _CHUNK):
                file.write(view[start : start + _CHUNK])
            file.flush()
            os.fsync(file.fileno())
            if unnamed is not None:
                if _name(file.fileno(), str(path)):
                    return
                if not _name(file.fileno(), temporary):
                    raise FileExistsError(temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def remove_leftovers(output: Path) -> None:
    """Remove what processes that were killed had made for this output: temporary folders and files.

    Those that are at work hold a lock on what they make, which goes with them however they end.
    """
    for found in output.parent.iterdir():
        rest = found.name.removeprefix(f".{output.name}.")
        if rest == found.name or not rest.partition(".")[0].isdigit() or found.is_symlink():
            continue
        try:
            descriptor = os.open(found, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            log.info("%s stays: %s", found, error)
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(found, output)
        except OSError as error:
            log.info("%s stays: %s", found, error)
        finally:
            os.close(descriptor)


def _remove(found: Path, output: Path) -> None:
    if not found.is_dir():
        found.unlink()
        return
    # Weights that had been moved to their place, where the model that reads them never was.
    orphans = external_files(found / output.name) - (external_files(output) if output.exists() else set())
    for name in orphans:
        if name.startswith(f"{output.name}.") and not (found / name).exists():
            (output.parent / name).unlink(missing_ok=True)
    shutil.rmtree(found, ignore_errors=True)


def _open_unnamed(folder: Path) -> int | None:
    """A file without a name; None where the system or the file system has none."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, flag | os.O_WRONLY, 0o666)
    except OSError:
        return None


def _name(descriptor: int, path: str) -> bool:
    """Give the unnamed file a name; False where it is taken."""
    # With a folder's descriptor Python calls linkat, which alone follows /proc's link to the unnamed file.
    root = os.open("/", os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", os.path.abspath(path), src_dir_fd=root, follow_symlinks=True)
    except FileExistsError:
        return False
    finally:
        os.close(root)
    return True


def _data_name(output: Path) -> str:
    """The name of the weights' file: never that of an existing one, which the file to be replaced may still need."""
    name, number = f"{output.name}.data", 1
    while (output.parent / name).exists():
        name, number = f"{output.name}.{number}.data", number + 1
    return name


def _move(folder: Path, data: str, output: Path) -> None:
    old = external_files(output) if output.exists() else set()
    target = output.parent / data
    if (folder / data).exists():
        os.replace(folder / data, target)
    try:
        os.replace(folder / output.name, output)
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    for name in old - {data}:
        if name.startswith(f"{output.name}."):
            (output.parent / name).unlink(missing_ok=True)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Let a polite request to end (SIGTERM, SIGHUP) unwind the stack, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    names = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, leave) for number in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
