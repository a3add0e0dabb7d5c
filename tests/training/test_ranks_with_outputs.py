"""Models that return more than their loss, over two gloo processes: the parameters that they have without memopt."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from tests.training.test_fsdp import Block
from tests.training.two_ranks import found_by

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

WORKER = """
import sys
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import memopt
from tests.training.test_ranks_with_outputs import made
from tests.training.two_ranks import begin, tell

rank = begin()

def total(outputs, labels, form):
    if form == "loss":
        return outputs["loss"]
    return outputs["logits"].float().square().mean() + (outputs["loss"] if form == "both" else 0)

def trained(around, name, form, budget, planned):
    torch._dynamo.reset()
    model, batches, blocks = made(name)
    if around == "fsdp":
        for block in blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    budget = None if budget == "none" else float(budget)
    compiled = lambda it: memopt.compile(it, budget, optimizer=optimizer, backend="aten") if planned else it
    run = DDP(compiled(model)) if around == "ddp" else compiled(DDP(model) if around == "memopt" else model)
    for batch in batches:
        rows = {key: value.chunk(2)[rank] for key, value in batch.items()}
        outputs = run(**rows)
        total(outputs, rows["labels"], form).backward()
        del outputs
        optimizer.step()
        optimizer.zero_grad()
    report = (run.module if around == "ddp" else run).report if planned else None
    whole = [p.full_tensor() if around == "fsdp" else p.detach() for p in model.parameters()]
    return whole, report

found = []
for case in sys.argv[3:]:
    (expected, _), (whole, report) = (trained(*case.split(), planned) for planned in (False, True))
    start = made(case.split()[1])[0].parameters()
    found.append({
        "apart": max((a - b).abs().max().item() for a, b in zip(whole, expected, strict=True)),
        "moved": max((a - b).abs().max().item() for a, b in zip(whole, start, strict=True)),
        "peak": report.peak_bytes, "budget": report.budget_bytes})
tell(found)
"""

ROWS, WORDS, LENGTH = 8, 128, 32


class Plain(torch.nn.Module):
    """Returns its loss and its logits in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = torch.nn.Embedding(WORDS, 32), torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(32, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def made(name: str) -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]], list[torch.nn.Module]]:
    """A model, five batches of both ranks, and the blocks that are sharded; the same ones whenever they are made."""
    torch.manual_seed(0)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, WORDS, (5, ROWS, LENGTH))]
    if name == "plain":
        model = Plain()
        return model, batches, list(model.blocks)
    import transformers as tf

    sizes = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    bert = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    bert |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, **dropout, **sizes)
        )
    elif name == "llama":
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**llama, use_cache=False, **sizes))
    elif name == "t5":
        config = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16, "dropout_rate": 0.0}
        model = tf.T5ForConditionalGeneration(tf.T5Config(**config, decoder_start_token_id=0, **sizes))
    elif name == "bert":
        model = tf.BertForMaskedLM(tf.BertConfig(**bert, max_position_embeddings=LENGTH, **sizes))
    else:
        model = tf.ViTForImageClassification(tf.ViTConfig(**bert, image_size=16, patch_size=4))
        pictures = torch.randn(5, ROWS, 3, 16, 16)
        batches = [{"pixel_values": each, "labels": torch.arange(ROWS) % 2} for each in pictures]
    kinds = ("GPT2Block", "LlamaDecoderLayer", "T5Block", "BertLayer", "ViTLayer")
    return model.train(), batches, [each for each in model.modules() if type(each).__name__ in kinds]


QUICK = ("ddp plain loss none", "memopt plain loss 0.9", "fsdp plain loss 0.9", "ddp plain both none")
LONG = [
    f"{around} {name} {form} {budget}"
    for around in ("ddp", "memopt", "fsdp")
    for name, form, budget in (
        ("gpt2", "loss", "none"),
        ("llama", "loss", "0.9"),
        ("t5", "both", "0.9"),
        ("bert", "logits", "none"),
        ("vit", "loss", "0.75"),
    )
]


@pytest.fixture(scope="module")
def found_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict]]:
    return found_by(WORKER, tmp_path_factory, QUICK)


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)])
def test_parameters_are_those_without_memopt(case, found_of):
    if case not in QUICK and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    for found in found_of(case):
        assert found["moved"] > 1e-3
        assert found["apart"] < 1e-5
        assert found["budget"] is None or found["peak"] <= found["budget"]
