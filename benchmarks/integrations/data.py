"""The models and rows that the loops train on: small, random, with more activations than weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

BATCH, ACCUMULATED, LENGTH, WORDS = 8, 2, 48, 256
ROWS = 11 * BATCH + 3  # the last batch is smaller
STEPS = 6  # of the optimizer, in an epoch


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids that follow a rule, so that there is something to learn."""

    def __init__(self, size: int, seed: int) -> None:
        """Make them.

        Args:
            size: how many.
            seed: of their first ids.
        """
        first = torch.randint(0, WORDS, (size, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = (first + 7 * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def gpt2() -> Any:
    """A GPT-2 with dropout and random weights."""
    import transformers

    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 48, "n_head": 4, "vocab_size": WORDS, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    """A Llama with random weights."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=WORDS))


def with_adapters(model: Any) -> nn.Module:
    """The model with adapters of LoRA, which are all that is trained."""
    import peft

    modules = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM"))
