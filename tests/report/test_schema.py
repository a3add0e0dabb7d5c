"""docs/report_schema.md names every field of every record, and no other; real reports follow it."""

import dataclasses
import json
import re
import typing
from pathlib import Path

import pytest
import torch

import memopt
from memopt import models
from memopt.graph.record import GraphRecord, NodeRecord, StorageRecord
from memopt.report import Report, load
from memopt.report.json_format import SCHEMA, VERSION, from_json, to_json

DOCUMENT = Path(__file__).parents[2] / "docs" / "report_schema.md"


def documented() -> dict[str, set[str]]:
    found = {}
    for section in DOCUMENT.read_text().split("\n### ")[1:]:
        name, _, body = section.partition("\n")
        cells = [line.split("|")[1] for line in body.split("\n## ")[0].splitlines() if line.startswith("| `")]
        found[name.strip()] = {word for cell in cells for word in re.findall(r"`(\w+)`", cell)}
    return found


def records(kind: type, found: dict[str, set[str]] | None = None) -> dict[str, set[str]]:
    """Every dataclass that is reachable from `kind`, with its fields."""
    found = {} if found is None else found
    if kind.__name__ not in found:
        found[kind.__name__] = {field.name for field in dataclasses.fields(kind)}
        for hint in typing.get_type_hints(kind).values():
            for inner in leaves(hint):
                if dataclasses.is_dataclass(inner):
                    records(inner, found)
    return found


def leaves(hint: object) -> list[type]:
    arguments = typing.get_args(hint)
    return [leaf for argument in arguments for leaf in leaves(argument)] if arguments else [hint]


def test_every_field_is_documented_and_no_other():
    pytest.importorskip("onnx_ir")
    from memopt.convert.record import Conversion

    assert documented() == records(Conversion, records(Report))
    assert {"NodeRecord", "GraphRecord", "StorageRecord", "PassRecord"} <= set(documented())


def test_schema_and_version_are_documented():
    text = DOCUMENT.read_text()
    assert f'"{SCHEMA}"' in text
    assert f"| `version` | {VERSION}." in text


@pytest.fixture(scope="module", params=["training", "inference", "static"])
def report(request):
    torch.manual_seed(0)
    train = request.param == "training"
    model = models.build("gpt2" if train else "resnet50", tiny=True).train(train)
    backend = "static" if request.param == "static" else "aten"
    return memopt.plan(model, model.example_inputs(2, labels=train), 0.8 if train else None, backend=backend)


@pytest.mark.quick("inference", "static")
def test_real_reports_are_read_back_equal(report, tmp_path):
    report.save(tmp_path / "report.json")
    assert load(tmp_path / "report.json") == report


def test_rows_of_the_tables_are_as_documented(report):
    document = json.loads(to_json(report))
    columns = re.search(r"A row of `nodes` is `\[(.*?)\]`", DOCUMENT.read_text())[1].split(", ")
    assert set(columns) == {field.name for field in dataclasses.fields(NodeRecord)}
    strings, (program,) = document["strings"], document["report"]["programs"]
    graph = document["graphs"][program["after"]]
    assert set(graph) == {field.name for field in dataclasses.fields(GraphRecord)}
    assert len(graph["storages"][0]) == len(dataclasses.fields(StorageRecord))
    kept = report.programs[0].after
    for place, node in zip(graph["nodes"], kept.nodes, strict=True):
        row = dict(zip(columns, document["nodes"][place], strict=True))
        for column in columns[:7]:
            assert strings[row[column]] == getattr(node, column)
        assert [strings[item] for item in row["inputs"]] == list(node.inputs)
        assert ["", "forward", "backward"][row["phase"]] == node.phase


def test_every_graph_is_written_once(report):
    document = json.loads(to_json(report))
    graphs = {graph for item in report.passes for graph in (item.before, item.after) if graph is not None}
    graphs |= {graph for item in report.programs for graph in (item.before, item.after) if graph is not None}
    assert len(document["graphs"]) == len(graphs)
    assert len({json.dumps(row) for row in document["nodes"]}) == len(document["nodes"])
    assert len(set(document["strings"])) == len(document["strings"])


def test_every_program_and_pass_of_it_has_its_graphs(report):
    recorded = [item for item in report.passes if item.after is not None]
    assert recorded[-1].after.nodes == report.programs[0].after.nodes
    assert {node.phase for node in report.programs[0].after.steps} == (
        {"forward", "backward"} if report.programs[0].kind == "training" else {""}
    )
    assert any(node.module for node in report.programs[0].after.steps)
    assert any(node.source for node in report.programs[0].after.steps)


def test_the_arena_is_on_record(report):
    arena = report.programs[0].arena
    assert (arena is not None) == (report.backend == "static")
    if arena is not None:
        assert 0 < arena.lower_bound <= arena.bytes
        inside = [block for block in arena.blocks if block.home == "arena"]
        assert max(block.offset + block.bytes for block in inside) == arena.bytes
        for block in inside:
            for other in inside:
                if block is not other and block.start < other.end and other.start < block.end:
                    assert block.offset + block.bytes <= other.offset or other.offset + other.bytes <= block.offset


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("strings"), 'no table "strings"'),
        (lambda d: d["strings"].append(1), 'no table "strings"'),
        (lambda d: d.pop("nodes"), 'no table "nodes"'),
        (lambda d: d["nodes"][3].pop(), "row 3 of nodes is broken"),
        (lambda d: d["nodes"][3].__setitem__(0, 10**9), "row 3 of nodes is broken"),
        (lambda d: d["nodes"][3].__setitem__(0, -1), "row 3 of nodes is broken"),
        (lambda d: d["nodes"][3].__setitem__(8, "much"), "row 3 of nodes is broken"),
        (lambda d: d["graphs"][0].pop("unknown"), "row 0 of graphs is broken"),
        (lambda d: d["graphs"][0]["storages"][0].append(1), "row 0 of graphs is broken"),
        (lambda d: d["report"]["programs"][0].update(after=99), "after is 99"),
        (lambda d: d["report"]["programs"][0].update(after=True), "after is True"),
    ],
)
def test_broken_tables_are_refused_in_one_line(report, edit, message):
    document = json.loads(to_json(report))
    edit(document)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        from_json(json.dumps(document))
    assert "\n" not in str(caught.value)
