"""Where a verb's words go: formats by option and suffix, files whole or refused, a spinner on terminals only."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memopt.cli.group import USAGE, CommandError, Group, verbosity_options
from memopt.cli.output import chosen_format, emit, output_options, progress, refuse_existing


@pytest.mark.parametrize(
    ("form", "name", "expected"),
    [
        (None, None, "text"),
        ("json", None, "json"),
        (None, "a.json", "json"),
        (None, "a.HTML", "html"),
        (None, "a.txt", "text"),
        (None, "a.log", "text"),
        ("text", "a.html", "text"),
    ],
)
def test_the_format(form, name, expected) -> None:
    assert chosen_format(form, None if name is None else Path(name)) == expected


@pytest.mark.parametrize(("name", "expected"), [("a.json", "json"), ("a.html", "text"), ("a", "text")])
def test_a_suffix_of_a_form_that_the_verb_lacks_is_text(name, expected) -> None:
    assert chosen_format(None, Path(name), ("text", "json")) == expected


def test_what_could_not_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    refuse_existing(None, False)
    refuse_existing(tmp_path / "new.txt", False)
    present = tmp_path / "old.txt"
    present.write_text("old")
    refuse_existing(present, True)
    with pytest.raises(CommandError, match=r"old\.txt exists: choose another name or add --overwrite") as caught:
        refuse_existing(present, False)
    assert caught.value.exit_code == USAGE
    for overwrite in (False, True):
        with pytest.raises(CommandError, match=r"the folder of .* does not exist") as caught:
            refuse_existing(tmp_path / "absent" / "new.txt", overwrite)
        assert caught.value.exit_code == USAGE
    assert present.read_text() == "old"


def test_data_goes_to_stdout_with_one_newline(capsys: pytest.CaptureFixture[str]) -> None:
    emit("one\n", None)
    emit("two", None)
    assert capsys.readouterr() == ("one\ntwo\n", "")


def test_data_goes_to_the_file_and_the_place_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emit("data", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text().rstrip("\n") == "data"
    assert capsys.readouterr() == ("", f"written to {tmp_path / 'out.txt'}\n")
    assert list(tmp_path.iterdir()) == [tmp_path / "out.txt"], "no temporary file is left"


def test_the_options_of_a_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    @click.command()
    @output_options
    def verb(form: str | None, output: Path | None, overwrite: bool) -> None:
        seen.append((form, output, overwrite))

    monkeypatch.chdir(tmp_path)
    for words in ([], ["--format", "json", "-o", "x.html", "--overwrite"], ["--output", "y"]):
        assert CliRunner().invoke(verb, words).exit_code == 0
    assert seen == [(None, None, False), ("json", Path("x.html"), True), (None, Path("y"), False)]
    for words in (["--format", "xml"], ["-o", "."]):
        assert CliRunner().invoke(verb, words).exit_code == 2


@pytest.mark.parametrize(("terminal", "words", "spins"), [(True, [], True), (True, ["-q"], False), (False, [], False)])
def test_progress_is_shown_on_a_terminal_only(terminal, words, spins, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class Console:
        def __init__(self, stderr: bool) -> None:
            assert stderr

        def status(self, what: str) -> click.utils.KeepOpenFile:
            started.append(what)
            return click.utils.KeepOpenFile(sys.stdout)

    @click.group(cls=Group)
    @verbosity_options
    @click.pass_context
    def root(ctx: click.Context) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)

    @root.command()
    @click.pass_context
    def verb(ctx: click.Context) -> None:
        with progress(ctx, "planning"):
            click.echo("inside")

    monkeypatch.setattr("memopt.cli.output.Console", Console)
    result = CliRunner().invoke(root, [*words, "verb"])
    assert result.stdout == "inside\n", result.output
    assert started == (["planning"] if spins else [])
