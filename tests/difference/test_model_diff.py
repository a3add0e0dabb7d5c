"""Two models compared: figures, and what stands in each form."""

import json
import xml.dom.minidom

import torch
from torch import nn

import memopt
from memopt.difference.model_diff import compare_sides, side_of_programs, side_of_report
from memopt.difference.recorded import capture_programs


class Net(nn.Module):
    def __init__(self, slope: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.leaky_relu(layer(x), self.slope)
        return x


def side(net: nn.Module, training: bool = False, title: str = "<net>"):
    torch._dynamo.reset()
    programs = capture_programs(net.train(training), (torch.ones(4, 8),), {}, training=training)
    return side_of_programs(title, programs)


def test_equal_models():
    for training in (False, True):
        found = compare_sides(side(Net(), training), side(Net(), training))
        assert found.equal and "the same nodes" in found.to_text() and "@@" not in found.to_text()


def test_what_changed():
    found = compare_sides(side(Net()), side(Net(0.2)))
    assert not found.equal and found.graphs[0].counts()["changed"] == 2
    text = found.to_text(context=0)
    assert "-leaky_relu: float32[4, 8] = aten.leaky_relu(addmm, 0.1)" in text
    assert "+leaky_relu: float32[4, 8] = aten.leaky_relu(addmm, 0.2)" in text
    assert "@@" not in found.to_text(summary=True)


def test_figures():
    found = compare_sides(side(Net()), side(Net(layers=3)))
    figures = {row.name: (row.before, row.after) for row in found.figures}
    assert figures["weights"] == (2 * 72 * 4, 3 * 72 * 4)
    assert figures["nodes"] == (6, 9)
    assert figures["activations at the peak"] == (2 * 128, 2 * 128)
    assert ("parameter", 4, 6) in found.graphs[0].by_operator()


def test_another_value_of_a_weight():
    other = Net()
    with torch.no_grad():
        other.layers[1].weight[3, 3] += 1
    found = compare_sides(side(Net()), side(other))
    assert [row.why for row in found.graphs[0].rows if row.kind != "same"] == ["value"]


def test_json_and_html():
    found = compare_sides(side(Net()), side(Net(0.2, layers=3), title="other"))
    content = json.loads(found.to_json())
    assert content["format"] == "memopt diff" and not content["equal"]
    assert {row["kind"] for row in content["graphs"][0]["changes"]} == {"added", "changed"}
    page = found.to_html()
    for tag in ('<meta charset="utf-8">', '<meta name="viewport" content="width=device-width, initial-scale=1">'):
        page = page.replace(tag, "")
    for tag in ('<col class="mark">', "<col>"):
        page = page.replace(tag, "")
    xml.dom.minidom.parseString(page.replace("<!doctype html>", ""))
    assert "&lt;net&gt; → other" in page and "<net>" not in page and "http" not in page


def test_graphs_that_the_other_side_lacks():
    one = side(Net())
    found = compare_sides(one, side_of_programs("none", []))
    assert found.graphs[0].counts()["removed"] == len(one.graphs[0])


def test_reports():
    model = memopt.models.build("gpt2:tiny")
    inputs = model.example_inputs(2, labels=True)
    plain, planned = memopt.plan(model, inputs), memopt.plan(model, inputs, "95%")
    found = compare_sides(side_of_report("plain", plain), side_of_report("planned", planned))
    figures = {row.name: (row.before, row.after) for row in found.figures}
    assert figures["predicted peak"] == (plain.peak_bytes, planned.peak_bytes)
    assert figures["budget"] == (None, planned.budget_bytes) and "changes by checkpoint" in figures
    again = compare_sides(side_of_report("plain", plain), side_of_report("plain", plain))
    assert again.equal
