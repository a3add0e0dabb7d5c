"""What the end-to-end tests share: reference models with their inputs, one step, and the bytes that are resident."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt

FAMILIES = ("resnet18", "mobilenet_v3_large", "densenet121", "unet", "vit_b_16", "bert_base", "gpt2", "llama_tiny")
OTHERS = tuple(name for name in memopt.models.names() if name not in FAMILIES)
HUGGING_FACE = ("hf_bert", "hf_gpt2", "hf_t5", "hf_vit", "hf_llama")


def cases(quick: tuple[str, ...] = (*FAMILIES, *HUGGING_FACE)) -> list[Any]:
    """All reference models as parameters of a test; those that are not quick are marked slow."""
    every = (*FAMILIES, *HUGGING_FACE, *OTHERS)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in every]


def build(name: str, *, labels: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model with random weights, and keyword arguments for it: with labels it returns a loss."""
    torch.manual_seed(0)
    if name in HUGGING_FACE:
        model, inputs = _hugging_face(name)
        if not labels and name != "hf_t5":
            del inputs["labels"]
        return model, inputs
    model = memopt.models.build(name, tiny=True)
    return model, model.example_inputs(4, labels=labels)


def _hugging_face(name: str) -> tuple[nn.Module, dict[str, Any]]:
    hf = pytest.importorskip("transformers")
    hf.logging.set_verbosity_error()
    # transformers reports what its own configs lack by logging on import; no weights are ever downloaded.
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    tokens = {"vocab_size": 64, "max_position_embeddings": 32}
    ids = torch.randint(0, 64, (4, 16))
    text = {"input_ids": ids, "labels": ids.clone()}
    if name == "hf_bert":
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, **tokens)), text
    if name == "hf_gpt2":
        special = {"bos_token_id": 0, "eos_token_id": 0}
        config = hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, **special)
        return hf.GPT2LMHeadModel(config), text
    if name == "hf_t5":
        shape = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
        return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **shape)), text
    if name == "hf_vit":
        config = hf.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
        images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
        return hf.ViTForImageClassification(config), images
    config = hf.LlamaConfig(**sizes, **tokens, num_key_value_heads=1)
    return hf.LlamaForCausalLM(config), text


def in_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs with their floating-point tensors in the dtype."""
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}


def step(run: Callable[..., Any], inputs: dict[str, Any], seed: int = 1) -> torch.Tensor:
    """One forward and backward under a seed; the loss."""
    torch.manual_seed(seed)
    out = run(**inputs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """A copy of each parameter's gradient, in order."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def true_step(model: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor | None]:
    """The loss and the gradients of one step in float64, of a copy of the model."""
    exact = copy.deepcopy(model).double()
    return [step(exact, in_dtype(inputs, torch.float64)), *gradients(exact)]


def assert_as_exact(
    found: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    true: Sequence[torch.Tensor | None],
    report: memopt.Report,
) -> None:
    """A step's numbers are bitwise eager's: in float32 that is no worse than eager, whatever eager's own error is.

    Where a rewrite that declares other rounding was used, to keep the budget or as it costs less time, each number's
    float64 error is at most twice eager's.
    """
    rounding = {item.name for item in memopt.TRAINING if item.tolerance}
    rounds = any(record.changes and record.name in rounding for record in report.passes)
    assert [value is None for value in found] == [value is None for value in expected]
    for new, old, reference in zip(found, expected, true, strict=True):
        if new is None or old is None or reference is None:
            continue
        if not rounds:
            torch.testing.assert_close(new, old, rtol=0, atol=0)
            continue
        # In float64 eager's own error is not known: a sum in another order is some eps away from it.
        floor = (32 if new.dtype == torch.float64 else 8) * torch.finfo(new.dtype).eps * reference.abs().max()
        assert (new - reference).abs().max() <= 2 * (old - reference).abs().max() + floor


def restorer(model: nn.Module) -> Callable[[], None]:
    """A function that puts parameters and buffers back to what they are now, and drops the gradients."""
    start = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]

    def restore() -> None:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, value in start:
                tensor.copy_(value)

    return restore


def resident_bytes(model: nn.Module, inputs: Any) -> int:
    """Bytes of the distinct storages of parameters, buffers and inputs."""
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(inputs)]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@functools.cache
def planned(name: str, dtype: torch.dtype = torch.float32) -> memopt.Report:
    """The report of a plan without a budget: the least and the unconstrained bytes of the model's step."""
    torch._dynamo.reset()
    model, inputs = build(name)
    return memopt.plan(model.to(dtype), in_dtype(inputs, dtype))


def budget_of(name: str, share: float | None, dtype: torch.dtype = torch.float32) -> int | None:
    """A feasible budget: 2 % above the least at share 0, what the model takes without a plan at share 1."""
    if share is None:
        return None
    report = planned(name, dtype)
    low, high = int(report.minimum_bytes * 1.02), report.unconstrained_bytes
    return int(low + share * (high - low))
