import json

import pytest

from benchmarks.packing_instances import cut_rectangle
from memopt.solve.pack_csv import read_table
from tests.cli.conftest import assert_one_line
from tests.solve.check_pack import check_packing

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def example(folder):
    (folder / "in.csv").write_text(EXAMPLE)
    return folder / "in.csv"


def offsets(text):
    header, *lines = text.splitlines()
    assert header.split(",")[-1] == "offset"
    return [int(line.split(",")[-1]) for line in lines]


def test_the_lines_are_printed_with_offsets_and_a_summary_on_stderr(run, example):
    result = run("pack", example, "--capacity", 12)
    assert result.exit_code == 0
    assert [line.rsplit(",", 1)[0] for line in result.stdout.splitlines()] == EXAMPLE.splitlines()
    check_packing(read_table(EXAMPLE).buffers, offsets(result.stdout), 12)
    assert result.stderr.startswith("5 buffers in 12 bytes (the least possible)")
    assert result.stderr.count("\n") == 1
    assert run("pack", "-q", example, "--capacity", 12).stderr == ""


def test_without_a_capacity_the_least_is_found(run, example):
    check_packing(read_table(EXAMPLE).buffers, offsets(run("pack", example).stdout), 12)


def test_json_says_what_is_known(run, example):
    found = json.loads(run("pack", example, "--capacity", "1KiB", "--format", "json").stdout)
    assert {key: found[key] for key in ("capacity", "lower_bound")} == {"capacity": 1024, "lower_bound": 12}
    assert found["optimal"] == (found["size"] == 12)
    assert found["buffers"][0].items() >= {"id": "b1", "lower": 0, "upper": 3, "size": 4, "alignment": 1}.items()
    check_packing(read_table(EXAMPLE).buffers, [row["offset"] for row in found["buffers"]], found["size"])


def test_a_file_is_written_and_never_by_accident(run, example, folder):
    words = ("pack", example, "-o", "out.csv")
    result = run(*words)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr.startswith("written to out.csv\n")
    check_packing(read_table(EXAMPLE).buffers, offsets((folder / "out.csv").read_text()), 12)
    (folder / "out.csv").write_text("mine")
    assert_one_line(run(*words), 2, "out.csv exists", "--overwrite")
    assert (folder / "out.csv").read_text() == "mine"
    assert run(*words, "--overwrite").exit_code == 0
    assert (folder / "out.csv").read_text().startswith("id,")
    assert run("pack", example, "-o", "out.json").exit_code == 0
    assert json.loads((folder / "out.json").read_text())["size"] == 12


def test_a_refuted_capacity_is_exit_code_3_and_nothing_is_written(run, example, folder):
    result = run("pack", example, "--capacity", 11, "-o", "out.csv")
    assert_one_line(result, 3, "cannot fit in 11 bytes", "they provably need at least 12")
    assert not (folder / "out.csv").exists()


def test_not_found_in_time_is_told_from_refuted(run, folder):
    buffers = cut_rectangle(400, 800, 1 << 20, 1024, 7)
    lines = [f"{number},{b.lower},{b.upper},{b.size}" for number, b in enumerate(buffers)]
    (folder / "hard.csv").write_text("\n".join(["id,lower,upper,size", *lines]))
    result = run("pack", "hard.csv", "--capacity", 1 << 20, "--timeout", 0.01)
    assert_one_line(result, 3, "no way to fit", "1,048,576 bytes was found in 0.01 s", "lower bound is 1,048,576")
    assert "allow a longer --timeout" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("none.csv",), "none.csv"),
        (("in.csv", "--capacity", "-1"), "--capacity"),
        (("in.csv", "--capacity", "50%"), "a share of what?"),
        (("in.csv", "--capacity", "12XB"), "unknown unit"),
        (("in.csv", "--timeout", "0"), "--timeout"),
        (("in.csv", "--format", "html"), "--format"),
        (("in.csv", "-o", "no/such.csv"), "the folder of no/such.csv does not exist"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(run, example, words, expected):
    assert_one_line(run("pack", *words), 2, expected)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"id,lower,upper,size\nb1,0,3,4\nb2,x,9,4\n", "in.csv: line 3, column lower: 'x' is not a whole number"),
        (b"id,lower,size\n", "in.csv: line 1: no column upper"),
        (b"id,lower,upper,size\n\xff,0,1,2\n", "in.csv: no text in UTF-8"),
        (
            b"id,lower,upper,size\n1,0,1,900000000000000000\n2,0,1,900000000000000000\n",
            "in.csv: sizes and alignments add",
        ),
        (b"", "in.csv: line 1: no header"),
    ],
)
def test_a_malformed_file_is_one_line_and_exit_code_2(run, folder, content, expected):
    (folder / "in.csv").write_bytes(content)
    assert_one_line(run("pack", "in.csv", "-o", "out.csv"), 2, expected)
    assert not (folder / "out.csv").exists()
