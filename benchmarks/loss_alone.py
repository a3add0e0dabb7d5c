"""How much less memory a training step needs where gradients of its loss alone are planned for, beside all outputs'.

python benchmarks/loss_alone.py [--engine aten] [NAMES] [--markdown FILE]

Small models of transformers with random weights and vocabularies of thousands: their logits are most of the step, as
in large ones. Each is refused a budget of 1 kB with all gradients and with those of the loss; then it is trained within
1.02 of the second minimum, and three losses are compared with eager's. Ends with 1 where one differs by over 1e-4.
"""

from __future__ import annotations

import argparse
import copy
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import memopt

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS, STEPS, CLOSE = 3000, 3, 1e-4


def gpt2() -> nn.Module:
    """GPT-2, which returns keys and values of its cache, too."""
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=WORDS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """Llama, with fewer heads of keys and values than of queries."""
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=WORDS)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """BERT with its head for masked words."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=WORDS))


def t5() -> nn.Module:
    """T5, encoder and decoder."""
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    """BART, encoder and decoder."""
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _SIDE.items()}
    config = transformers.BartConfig(d_model=32, vocab_size=WORDS, **sides)
    return transformers.BartForConditionalGeneration(config)


_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
MODELS: dict[str, Callable[[], nn.Module]] = {made.__name__: made for made in (gpt2, llama, bert, t5, bart)}


def least(model: nn.Module, batch: dict[str, Any], engine: str, **options: Any) -> int:
    """The minimum that a refusal names, in bytes."""
    torch._dynamo.reset()
    try:
        memopt.compile(copy.deepcopy(model), "1kB", backend=engine, **options)(**batch)
    except memopt.BudgetError as refused:
        return refused.minimum_bytes
    raise RuntimeError("a budget of 1 kB was not refused")


def losses(model: nn.Module, called: Callable[..., Any], batch: dict[str, Any]) -> list[float]:
    """Those of some steps, with the same random numbers for every caller."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def row(name: str, engine: str) -> tuple[str, bool]:
    """A line of the table, and whether losses are eager's."""
    torch.manual_seed(0)
    model, ids = MODELS[name]().train(), torch.randint(0, 100, (2, 24))
    batch = {"input_ids": ids, "labels": ids}
    every = least(model, batch, engine, verify="full")  # which compares gradients of all outputs
    alone = least(model, batch, engine)
    torch._dynamo.reset()
    budget, twin = int(1.02 * alone), copy.deepcopy(model)
    run = memopt.compile(model, f"{budget}B", backend=engine)
    pairs = zip(losses(model, run, batch), losses(twin, twin, batch), strict=True)
    apart = max(abs(found - expected) for found, expected in pairs)
    figures = f"{every / 1e6:.2f} MB | {alone / 1e6:.2f} MB | {alone / every:.2f} | {apart:.0e}"
    return f"| {name} | {figures} |", apart <= CLOSE


def main() -> int:
    """Print the table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], default=[])
    parser.add_argument("--engine", default="aten")
    parser.add_argument("--markdown")
    given = parser.parse_args()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}"
    lines = [
        f"Minima of a training step on the engine `{given.engine}` ({versions}; `benchmarks/loss_alone.py`):\n",
        "| model | gradients of all outputs | of the loss alone | ratio | losses apart from eager's |",
        "|---|---|---|---|---|",
    ]
    same = True
    for name in given.names or MODELS:
        line, close = row(name, given.engine)
        print(line, flush=True)
        lines.append(line)
        same &= close
    if given.markdown:
        Path(given.markdown).write_text("\n".join(lines) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
