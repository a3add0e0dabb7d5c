"""PyTorch's exporters without what they print beside the error that they raise."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator

FAKE = "torch._subclasses.fake_tensor"  # logs with a traceback what it raises as well
_LOGGERS = ("torch.export", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "onnxscript", FAKE)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what is printed and logged while a block exports a model; nothing where memopt's own log says all."""
    if logging.getLogger("memopt").isEnabledFor(logging.DEBUG):
        yield
        return
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
