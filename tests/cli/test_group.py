import logging
import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner

import memopt
from memopt.budget import BudgetError
from memopt.cli import VERBS, main
from memopt.cli.group import Group, one_line, set_up_logging, verbosity, verbosity_options
from memopt.torch_compat.logs import FAKE_TENSORS
from tests.cli.conftest import assert_one_line


@pytest.fixture
def group():
    @click.group(cls=Group)
    @verbosity_options
    @click.pass_context
    def root(ctx):
        set_up_logging(ctx)

    @root.command()
    @click.argument("kind")
    @verbosity_options
    @click.pass_context
    def verb(ctx, kind):
        log = logging.getLogger("memopt.test")
        log.info("progress")
        log.warning("careful")
        if kind == "budget":
            raise BudgetError(minimum_bytes=10**9, budget_bytes=10**6)
        if kind == "crash":
            raise RuntimeError("first\nsecond")
        if kind == "exit":
            ctx.exit(4)
        click.echo(verbosity(ctx))

    return root


def call(group, *words):
    return CliRunner().invoke(group, list(words))


def test_verbosity_adds_up_over_group_and_verb(group):
    assert call(group, "-v", "verb", "ok", "-vv").stdout == "3\n"
    assert call(group, "verb", "ok", "-v", "-q").stdout == "0\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "WARNING careful\n"), (["-v"], "INFO progress\nWARNING careful\n"), (["-q"], "")],
)
def test_log_goes_to_stderr_at_the_level_asked_for(group, words, expected):
    result = call(group, "verb", "ok", *words)
    assert result.stderr == expected


def test_handlers_do_not_pile_up(group):
    level, filters = logging.getLogger("memopt").level, list(warnings.filters)
    before = list(logging.getLogger("memopt").handlers)
    call(group, "-v", "verb", "ok", "-v")
    assert logging.getLogger("memopt").handlers == before
    assert logging.getLogger("memopt").level == level and warnings.filters == filters


def test_a_budget_that_cannot_be_met_is_exit_code_3(group):
    assert_one_line(call(group, "-q", "verb", "budget"), 3, "the minimum is 1.00 GB")


def test_a_crash_is_one_line_and_a_traceback_only_with_vv(group):
    assert_one_line(call(group, "-q", "verb", "crash"), 1, "RuntimeError: first (-vv shows more)")
    assert "Traceback" not in call(group, "verb", "crash", "-v").stderr
    assert "Traceback" in call(group, "verb", "crash", "-vv").stderr


def test_exit_codes_of_verbs_are_kept(group):
    assert call(group, "verb", "exit").exit_code == 4


@pytest.mark.parametrize("words", [["--frob"], ["frob"], ["verb"], ["verb", "ok", "--frob"], ["verb", "ok", "more"]])
def test_usage_errors_are_one_line_and_exit_code_2(group, words):
    assert_one_line(call(group, "-q", *words), 2, "--help)")


def test_long_messages_are_cut():
    assert len(one_line("x" * 10_000)) < 700
    assert one_line("  \n") == "unknown"


def test_version_and_help(run):
    assert run("--version").stdout == f"memopt, version {memopt.__version__}\n"
    for words in (["-h"], ["plan", "--help"], ["inspect", "-h"], ["demo", "--help"]):
        result = run(*words)
        assert result.exit_code == 0
        assert result.stdout.startswith("Usage: ")
        assert result.stderr == ""


@pytest.mark.parametrize(("flag", "heard"), [("-q", False), ("-vv", True)])
def test_what_torch_logs_beside_its_errors_is_heard_where_all_is_asked_for(flag, heard, caplog):
    @click.command()
    @verbosity_options
    def fails():
        logging.getLogger(FAKE_TENSORS).error("a traceback of many lines")

    CliRunner().invoke(fails, [flag])
    assert bool(caplog.records) == heard
    caplog.clear()
    logging.getLogger(FAKE_TENSORS).error("afterwards")
    assert [record.message for record in caplog.records] == ["afterwards"]


def test_help_lists_each_verb_by_its_own_first_line():
    context = click.Context(main)
    for name, (_, line) in VERBS.items():
        assert main.get_command(context, name).get_short_help_str(limit=200) == line
    assert main.get_command(context, "compile") is None
    assert main.list_commands(context) == sorted(VERBS)


def test_the_package_runs_as_the_command():
    done = subprocess.run([sys.executable, "-m", "memopt", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"memopt, version {memopt.__version__}\n"
