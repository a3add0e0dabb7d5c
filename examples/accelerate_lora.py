"""LoRA adapters of a Llama in accelerate, within a budget: `python examples/accelerate_lora.py --when before`.

Needs `pip install memopt[train]`. A tiny model with random weights, so that nothing is downloaded and a CPU suffices.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memopt


def main() -> None:
    """Train a few steps with accumulation and clipping, and print the losses and what was planned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget", default="100MB", help="as memopt.compile takes it: 20GB, 60%%; none: without memopt"
    )
    parser.add_argument("--when", choices=["before", "after"], default="before", help="compile before or after prepare")
    parser.add_argument("--backend", default=None, help="as memopt.compile takes it")
    given = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    limited = given.budget != "none"
    if limited and given.when == "before":
        model = memopt.compile(model, given.budget, optimizer=optimizer, backend=given.backend)
    model, optimizer = accelerator.prepare(model, optimizer)
    if limited and given.when == "after":
        model = memopt.compile(model, given.budget, optimizer=optimizer, backend=given.backend)
    ids = torch.randint(0, 256, (8, 4, 32)).to(accelerator.device)
    for batch in ids:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    if limited:
        print(accelerator.unwrap_model(model).report)


if __name__ == "__main__":
    main()
