"""Where a node comes from, by the notes of torch's exporter."""

import onnx_ir as ir
import pytest

from memopt.onnx.origin import MODULE, SOURCE, module_of, origin_of, source_of

SCOPES, STACK = "pkg.torch.onnx.name_scopes", "pkg.torch.onnx.stack_trace"
TRACE = """File "/home/me/model.py", line 7, in forward
    return self.layer(x)
File "/venv/torch/nn/modules/linear.py", line 130, in forward
    return F.linear(input, self.weight, self.bias)"""


def node(name="node", **notes):
    return ir.Node("", "Relu", [], name=name, metadata_props=notes)


def test_the_module_and_the_line_of_the_model_s_own_code():
    found = origin_of(node(**{SCOPES: "['', 'layers', 'layers.0', 'relu']", STACK: TRACE}))
    assert found == {MODULE: "layers.0", SOURCE: "/home/me/model.py:7, return self.layer(x)"}


def test_lines_of_torch_alone_are_none():
    (_, torchs) = TRACE.split("x)\n")
    assert origin_of(node(**{STACK: torchs})) == {}
    assert origin_of(node(**{STACK: torchs.replace("/", "\\")})) == {}


@pytest.mark.parametrize("scopes", ["", "[", "['one']", "['', 3]", "['of another', 'exporter']", "__import__('os')"])
def test_notes_of_another_kind_say_nothing(scopes):
    assert origin_of(node(**{SCOPES: scopes})) == {}


def test_names_of_older_exporters_say_the_module():
    made = node("/layers/layers.0/Relu")
    assert module_of(made) == "layers.layers.0" and source_of(made) == ""
    assert module_of(node("Relu_3")) == ""
    made.meta.update({MODULE: "noted", SOURCE: "model.py:1"})
    assert (module_of(made), source_of(made)) == ("noted", "model.py:1")
