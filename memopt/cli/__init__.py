"""The command line: `memopt VERB …`."""

from __future__ import annotations

import os

import click

import memopt
from memopt.cli.bisect import bisect
from memopt.cli.compare import compare
from memopt.cli.convert import convert
from memopt.cli.demo import demo
from memopt.cli.diff import diff
from memopt.cli.group import Group, set_up_logging, verbosity_options
from memopt.cli.inspect_ import inspect
from memopt.cli.pack import pack
from memopt.cli.plan import plan


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@verbosity_options
@click.version_option(memopt.__version__, prog_name="memopt")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Say how much memory you have; memopt makes your model fit.

    Exit codes: 0 done, 1 failed, 2 usage, 3 the budget cannot be met, 4 the numbers differ.
    """
    set_up_logging(ctx)
    # torch's profiler, which measures memory, else prints lines of its own to stderr at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


for verb in (demo, plan, convert, compare, inspect, diff, bisect, pack):
    main.add_command(verb)
