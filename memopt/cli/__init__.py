"""The command line: `memopt VERB …`."""

from __future__ import annotations

import os

import click

import memopt
from memopt.cli.group import Group, set_up_logging, verbosity_options

# Each verb with the line that `memopt --help` shows: its file, and torch with it, is imported when the verb runs.
VERBS = {
    "bisect": (
        "memopt.cli.bisect:bisect",
        "Find the rewrite of MODEL that breaks a check: halve the passes, then the changes within the guilty one.",
    ),
    "compare": (
        "memopt.cli.compare:compare",
        "Run MODEL on several engines, one after another, and show time, memory and error of each.",
    ),
    "convert": (
        "memopt.cli.convert:convert",
        "Convert SOURCE to an ONNX file that computes the same, proved by real runs at several shapes.",
    ),
    "demo": (
        "memopt.cli.demo:demo",
        "Train a GPT and a ResNet inside 60 % and 45 % of the memory that they take, and check the gradients.",
    ),
    "diff": (
        "memopt.cli.diff:diff",
        "Show what changed from A to B: figures, operators, and the nodes as a unified diff.",
    ),
    "inspect": (
        "memopt.cli.inspect_:inspect",
        "Show where the bytes of one step of MODEL go: breakdown, timeline, and the largest tensors at the peak.",
    ),
    "pack": (
        "memopt.cli.pack:pack",
        "Place buffers in one arena so that those alive together share no byte.",
    ),
    "plan": (
        "memopt.cli.plan:plan",
        "Say what would be done to run a step of MODEL within a budget, without running one.",
    ),
}


@click.group(cls=Group, verbs=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
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
