"""Two models side by side as one page."""

from memopt.difference.graph_diff import GraphNode, align
from memopt.difference.model_diff import Figure, ModelDiff
from memopt.report.diff_page import to_html


def chain(*operators):
    nodes = [GraphNode("x", "input")]
    for index, operator in enumerate(operators):
        nodes.append(GraphNode(f"n{index}", operator, (nodes[-1].name,), "(%0)"))
    return nodes


def page(before, after, context=1):
    graph = align(chain(*before), chain(*after))
    return to_html(
        ModelDiff("a <b>", "c", (Figure("nodes", len(before), len(after), is_bytes=False),), (graph,)), context
    )


def test_what_changed_stands_beside_its_surroundings_and_the_rest_is_counted():
    same = [f"aten.op{index}" for index in range(6)]
    text = page([*same, "aten.relu"], [*same, "aten.gelu"])
    assert "a &lt;b&gt; → c" in text and "<b>" not in text, "what models are called is no markup"
    assert '<td class="gone"><code>' in text and '<td class="new"><code>' in text
    assert "6 the same" in text and "aten.op5" in text and "aten.op1(" not in text
    assert 'aten.relu</code></td><td class="number">1</td><td class="number">0</td>' in text


def test_equal_graphs_show_no_nodes():
    text = page(["aten.relu"], ["aten.relu"])
    assert "the same nodes" in text and 'class="nodes"' not in text
