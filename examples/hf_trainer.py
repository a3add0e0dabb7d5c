"""Fine-tune within a memory budget in Hugging Face's Trainer: `python examples/hf_trainer.py --budget 60%`.

Needs `pip install memopt[train]`. A tiny model with random weights, so that nothing is downloaded and a CPU suffices.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from memopt.integrations.hf import MemoptCallback


def main() -> None:
    """Train two epochs and print what was planned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%", help="as memopt.compile takes it: 20GB, 60%%")
    budget = parser.parse_args().budget
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, n_positions=64))
    rows = TensorDataset(torch.randint(0, 256, (64, 48)))
    callback = MemoptCallback(budget=budget)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, num_train_epochs=2, per_device_train_batch_size=8, report_to=[])
        Trainer(
            model=model,
            args=arguments,
            train_dataset=rows,
            data_collator=lambda batch: {"input_ids": (ids := torch.stack([row for (row,) in batch])), "labels": ids},
            callbacks=[callback],
        ).train()
    print(callback.report)


if __name__ == "__main__":
    main()
