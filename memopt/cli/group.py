"""The command group: every failure becomes one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import IO, Any

import click

from memopt.budget import BudgetError
from memopt.torch_compat.logs import FAKE_TENSORS

FAILED, USAGE, BUDGET, DIFFERENT = 1, 2, 3, 4

_VERBOSITY = "memopt.verbosity"
_LONGEST = 600


class CommandError(click.ClickException):
    """A failure that is shown as one line; `exit_code` is one of FAILED, USAGE, BUDGET and DIFFERENT."""

    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click means a default, and reads the instance's

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line to stderr."""
        click.echo(f"error: {one_line(self.message)}", file=file, err=True)


class Group(click.Group):
    """Turns exceptions into one line and an exit code; with -vv the traceback precedes it."""

    def __init__(self, *args: Any, verbs: Mapping[str, tuple[str, str]] | None = None, **options: Any) -> None:
        """Take click's own arguments, and verbs that are imported when they run: `module:command`, and a line of help.

        Help lists the verbs by these lines, without importing them.
        """
        super().__init__(*args, **options)
        self._verbs = dict(verbs or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all verbs, in order."""
        return sorted({*super().list_commands(ctx), *self._verbs})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb of this name, imported now; None where there is none."""
        if cmd_name in self._verbs and cmd_name not in self.commands:
            module, _, attribute = self._verbs[cmd_name][0].partition(":")
            self.add_command(getattr(importlib.import_module(module), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the verbs in the group's help."""
        rows = [(name, self._verbs[name][1]) for name in self.list_commands(ctx) if name in self._verbs]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the group's own options."""
        with _usage_in_one_line(None):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        # Libraries' warnings are noise on a command line, unless asked for.
        with warnings.catch_warnings(), _usage_in_one_line(ctx):
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
                raise
            except BudgetError as error:
                raise CommandError(str(error), BUDGET) from error
            except Exception as error:
                if verbosity(ctx) >= 2:
                    traceback.print_exc(file=sys.stderr)
                raise CommandError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _usage_in_one_line(ctx: click.Context | None) -> Iterator[None]:
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        where = (error.ctx or ctx).command_path if error.ctx or ctx else "memopt"  # type: ignore[union-attr]
        raise CommandError(f"{error.format_message()} (see {where} --help)", USAGE) from error


def one_line(message: str) -> str:
    """The first line of a message, cut where it is too long for a terminal."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()] or ["unknown"]
    first = lines[0] if len(lines[0]) <= _LONGEST else f"{lines[0][:_LONGEST]}…"
    return first if len(lines) == 1 else f"{first} (-vv shows more)"


def verbosity(ctx: click.Context) -> int:
    """How often -v was given, less how often -q was, on the group and on the verb together."""
    return int(ctx.meta.get(_VERBOSITY, 0))


def _add_verbosity(ctx: click.Context, option: click.Parameter, count: int) -> None:
    ctx.meta[_VERBOSITY] = verbosity(ctx) + (count if option.name == "verbose" else -count)
    set_up_logging(ctx)


def verbosity_options(command: Any) -> Any:
    """Add -v/--verbose and -q/--quiet, each repeatable, to a command."""
    for names, text in (
        (("-v", "--verbose"), "Say more; -vv: all, with tracebacks."),
        (("-q", "--quiet"), "Say less."),
    ):
        command = click.option(
            *names, count=True, expose_value=False, callback=_add_verbosity, is_eager=True, help=text
        )(command)
    return command


def all_asked_for(_: logging.LogRecord) -> bool:
    """Whether everything is to be logged."""
    return logging.getLogger("memopt").isEnabledFor(logging.DEBUG)


def set_up_logging(ctx: click.Context) -> None:
    """Send memopt's log to stderr at the level asked for, and warnings likewise, for as long as the command runs."""
    level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(max(-1, min(verbosity(ctx), 2)), logging.DEBUG)
    logger, root = logging.getLogger("memopt"), ctx.find_root()
    if "memopt.log" not in root.meta:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        root.meta["memopt.log"] = handler
        logger.addHandler(handler)
        before = logger.level
        root.call_on_close(lambda: logger.setLevel(before))
        root.call_on_close(lambda: logger.removeHandler(handler))
        root.with_resource(warnings.catch_warnings())
        fake = logging.getLogger(FAKE_TENSORS)
        fake.addFilter(all_asked_for)
        root.call_on_close(lambda: fake.removeFilter(all_asked_for))
    logger.setLevel(level)
    warnings.simplefilter("ignore" if verbosity(ctx) < 1 else "default")
