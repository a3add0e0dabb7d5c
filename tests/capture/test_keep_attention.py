"""Masks that tracing builds: dropped where they do nothing or are causal, copied where they would cost the kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from memopt.capture import keep_attention
from memopt.capture.keep_attention import keep_fused_attention
from memopt.pass_manager import Pass, PassResult

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


INF = float("inf")
B, H, L, D = 2, 3, 20, 8
SDPA = keep_attention._ATTENTION


def heads(queries=L, keys=L):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(B, H, n, D, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (queries, keys, keys)
    ]


def calls(module):
    """What each attention is given, as (whether there is a mask, is_causal)."""
    found = [node for node in module.graph.nodes if node.target in SDPA]
    return [
        (
            keep_attention._argument(node, 3, "attn_mask") is not None,
            bool(keep_attention._argument(node, 5, "is_causal")),
        )
        for node in found
    ]


def kept(function, *args):
    """How many attentions Dynamo's graph of the function had changed and how they stand; values must stay."""
    found = []

    def backend(module, inputs):
        before = {id(node) for node in module.graph.nodes}
        found.append((keep_fused_attention(module), calls(module)))
        assert keep_fused_attention(module) == 0
        assert before <= {id(node) for node in module.graph.nodes}
        return module.forward

    leaves = [arg for arg in args if arg.requires_grad]
    torch.manual_seed(0)
    expected = function(*args)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    torch.manual_seed(0)
    result = torch.compile(function, backend=backend)(*args)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)
    again = torch.autograd.grad(result.square().sum(), leaves)
    torch.testing.assert_close(again, gradients, rtol=1e-10, atol=1e-12)
    ((changed, attentions),) = found
    return changed, attentions


def masked(mask_of):
    return lambda q, k, v, *more: F.scaled_dot_product_attention(q, k, v, mask_of(q, *more))


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda q: torch.ones(L, L, dtype=torch.bool),
        lambda q: torch.arange(L).new_ones((), dtype=torch.bool).expand(B, 1, L, L),
        lambda q: (torch.arange(L)[:, None] >= 0).expand(B, 1, L, L),
        lambda q: torch.zeros(1, 1, 1, L, dtype=torch.float64),
    ],
)
def test_a_mask_that_hides_nothing_is_dropped(mask_of):
    assert kept(masked(mask_of), *heads()) == (1, [(False, False)])


@pytest.mark.parametrize(
    "mask_of",
    [
        lambda q: torch.ones(L, L, dtype=torch.bool).tril(),
        lambda q: (torch.arange(L)[None, :] <= torch.arange(L)[:, None]).expand(B, 1, L, L),
        lambda q: torch.full((L, L), -INF, dtype=torch.float64).triu(1),
        lambda q: torch.where(torch.ones(L, L, dtype=torch.bool).tril(), 0.0, torch.tensor(-1e300, dtype=q.dtype)),
        lambda q: ~torch.ones(1, 1, L, L, device="cpu").triu(1).to(torch.bool),
    ],
)
def test_a_causal_mask_becomes_a_flag(mask_of):
    assert kept(masked(mask_of), *heads()) == (1, [(False, True)])


def window(q):
    row, column = torch.arange(L)[:, None], torch.arange(L)
    return (column <= row) & (row - column < 4)


def written_to(q):
    mask = torch.ones(L, L, dtype=torch.bool)
    mask[:, 3:5] = False
    return mask


def written_through_a_view(q):
    mask = torch.zeros(L, L, dtype=torch.float64)
    mask.view(-1)[7:9].sub_(1.0)
    return mask


@pytest.mark.parametrize(
    "mask_of",
    [
        window,
        written_to,
        written_through_a_view,
        lambda q: torch.full((L, L), -1.0, dtype=torch.float64).triu(1),
        lambda q: torch.full((L, L), -INF, dtype=torch.float64).triu(1) + 1,
        lambda q: torch.rand(L, L) < 2,
        lambda q: torch.zeros(L, L, dtype=torch.float64) * q.detach().sum(),
    ],
)
def test_other_masks_stay(mask_of):
    assert kept(masked(mask_of), *heads()) == (0, [(True, False)])


def test_masks_of_the_caller_stay():
    mask = torch.ones(B, 1, L, L, dtype=torch.bool)
    assert kept(masked(lambda q, m: m), *heads(), mask) == (0, [(True, False)])
    bias = torch.zeros(H, L, L, dtype=torch.float64, requires_grad=True)
    assert kept(masked(lambda q, b: b * 1), *heads(), bias) == (0, [(True, False)])


@pytest.mark.parametrize(("queries", "keys"), [(4, L), (L, 4)])
def test_a_triangle_over_other_numbers_of_keys_stays(queries, keys):
    mask = masked(lambda q: torch.ones(queries, keys, dtype=torch.bool).tril())
    assert kept(mask, *heads(queries, keys)) == (0, [(True, False)])


def test_a_large_mask_stays(monkeypatch):
    monkeypatch.setattr(keep_attention, "LARGEST", L * L - 1)
    assert kept(masked(lambda q: torch.ones(L, L).bool()), *heads()) == (0, [(True, False)])


def test_each_attention_on_its_own():
    def function(q, k, v):
        causal = torch.ones(L, L, dtype=torch.bool).tril()
        first = F.scaled_dot_product_attention(q, k, v, causal, 0.0, False)
        second = F.scaled_dot_product_attention(first, k, v, attn_mask=window(q))
        third = F.scaled_dot_product_attention(second, k, v, None, 0.0, True)
        return F.scaled_dot_product_attention(third, k, v, attn_mask=causal, scale=0.5)

    assert kept(function, *heads()) == (2, [(False, True), (True, False), (False, True), (False, True)])


def on_fake_cuda(strides):
    """A graph as Dynamo makes it on CUDA, of two attentions that read one mask of the caller's."""
    graph = fx.Graph()
    q, mask = graph.placeholder("q"), graph.placeholder("mask")
    with FakeTensorMode():
        q.meta["example_value"] = torch.empty(B, H, L, D, device="cuda")
        mask.meta["example_value"] = torch.empty_strided((B, 1, L, L), strides, dtype=torch.bool, device="cuda")
    out = q
    for _ in range(2):
        out = graph.call_function(SDPA[0], (out, q, q), {"attn_mask": mask, "dropout_p": 0.1})
        out.meta["example_value"] = q.meta["example_value"]
    graph.output((out,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("strides", [(0, 0, 0, 0), (L, L, 1, 0), (L * L, L * L, 1, L)])
def test_on_cuda_a_mask_is_copied_once_where_its_layout_would_cost_the_kernel(strides):
    module = on_fake_cuda(strides)
    assert keep_fused_attention(module) == 2
    copies = [node for node in module.graph.nodes if node.target is torch.clone]
    attentions = [node for node in module.graph.nodes if node.target in SDPA]
    assert len(copies) == 1
    assert [node.kwargs["attn_mask"] for node in attentions] == copies * 2
    assert copies[0].kwargs == {"memory_format": torch.contiguous_format}
    module.graph.lint()


def test_on_cuda_other_masks_stay():
    assert keep_fused_attention(on_fake_cuda((L * L, L * L, L, 1))) == 0


# -- through the front door ----------------------------------------------------------------------------------------


class Record(Pass):
    name = "record"

    def __init__(self):
        self.programs = []

    def run(self, program):
        self.programs.append(program)
        return PassResult(program)


@pytest.mark.quick("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_causal_models_train_without_a_mask(family):
    hf = pytest.importorskip("transformers")
    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **dropout, attn_implementation="sdpa"))
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        heads = {"num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 32}
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))
    model.double().train()
    ids = torch.randint(0, 64, (2, 16))
    record = Record()
    compiled = memopt.compile(model, backend="aten", passes=(record,))
    compiled(input_ids=ids, labels=ids).loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-9, atol=1e-12)
    nodes = [node for program in record.programs for node in program.calls]
    fused = [node for node in nodes if "flash_attention_for_cpu.default" in str(node.target)]
    assert len(fused) >= 2
    assert all(node.args[4] is True for node in fused)
    assert not any("attn_mask" in node.kwargs for node in fused)
