"""Graphs side by side: who stands for whom, grouped by block, and alike blocks folded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memopt
from memopt import models
from memopt.graph.record import GraphRecord, NodeRecord
from memopt.report.side_by_side import block_of, grouped, side_by_side


def node(name, operator="aten.relu", inputs=(), module="", **more):
    return NodeRecord(name, name, operator, tuple(inputs), "(%0)" if inputs else "", "float32[2]", module, **more)


def graph(*nodes):
    return GraphRecord(tuple(nodes), (), len(nodes))


@pytest.mark.parametrize(
    ("module", "block"),
    [
        ("blocks.0.attention.qkv", "blocks.0"), ("stages.3.0.bn1", "stages.3.0"), ("head", "head"), ("", ""),
        ("bert.encoder.layer.11.output.dense", "bert.encoder.layer.11"), ("head.norm", "head"),
    ],
)  # fmt: skip
def test_block_of(module, block):
    assert block_of(module) == block


def test_a_new_node_stands_beside_the_one_that_it_replaces():
    before = graph(node("x", "input"), node("conv", "aten.convolution", ["x"]), node("norm", "aten.norm", ["conv"]))
    after = graph(node("x", "input"), node("fused", "mine.fused", ["x"], origins=("conv", "norm")))
    rows = [(pair.kind, pair.before and pair.before.name, pair.after and pair.after.name) for pair in
            side_by_side(before, after)]  # fmt: skip
    assert ("replaced", "norm", "fused") in rows
    assert ("removed", "conv", None) in rows
    assert len(rows) == 3


def test_a_name_given_again_is_not_taken_for_the_same_node():
    before = graph(node("x", "input"), node("a", "aten.relu", ["x"]))
    second = NodeRecord("a~2", "a", "aten.tanh", ("x",), "(%0)", "float32[2]")
    kinds = sorted(pair.kind for pair in side_by_side(before, graph(node("x", "input"), second)))
    assert kinds == ["added", "removed", "same"]


def blocks(count, operator="aten.relu", odd=None):
    nodes, last = [node("x", "input")], "x"
    for index in range(count):
        nodes.append(node(f"n{index}", "aten.gelu" if index == odd else operator, [last], f"blocks.{index}.act"))
        last = f"n{index}"
    return graph(*nodes)


def test_alike_blocks_are_folded_and_an_odd_one_is_not():
    folded = grouped(side_by_side(blocks(6), blocks(6, "aten.tanh", odd=2)))
    names = {group.name: len(group.blocks) for group in folded if any(pair.kind != "same" for pair in group.pairs)}
    assert names == {"blocks.*": 5, "blocks.2": 1}


def test_a_weight_lies_in_the_module_that_reads_it():
    before = graph(node("x", "input"), node("w", "parameter"), node("y", "aten.mul", ["x", "w"], "layers.3.scale"))
    after = graph(node("x", "input"), node("v", "constant"), node("y", "aten.mul", ["x", "v"], "layers.3.scale"))
    (group,) = [found for found in grouped(side_by_side(before, after)) if found.name == "layers.3"]
    assert {pair.node.name for pair in group.pairs} == {"x", "w", "v", "y"}


@settings(max_examples=50)
@given(st.lists(st.integers(0, 11), unique=True), st.lists(st.integers(0, 11), unique=True))
def test_every_node_stands_in_exactly_one_line(left, right):
    before = graph(*(node(f"n{i}", f"op{i % 3}", module=f"m.{i % 4}") for i in left))
    after = graph(*(node(f"n{i}", f"op{i % 2}", module=f"m.{i % 4}") for i in right))
    pairs = side_by_side(before, after)
    assert sorted(pair.before.id for pair in pairs if pair.before) == sorted(item.id for item in before.nodes)
    assert sorted(pair.after.id for pair in pairs if pair.after) == sorted(item.id for item in after.nodes)
    for group in grouped(pairs):
        assert len(set(group.blocks)) == len(group.blocks)


def test_a_real_pass_over_repeated_blocks_is_folded():
    torch.manual_seed(0)
    model = models.build("resnet50").eval()
    report = memopt.plan(model, model.example_inputs(1, resolution=32))
    fused = next(record for record in report.passes if record.name == "fuse_conv_bn")
    groups = grouped(side_by_side(fused.before, fused.after))
    assert max(len(group.blocks) for group in groups) == 16  # the bottlenecks of a ResNet-50
    assert sum(len(group.blocks) for group in groups) > 2 * len(groups)
