"""Supervised fine-tuning with TRL's SFTTrainer within a budget: `python examples/trl_sft.py --budget 40MB`.

Needs `pip install memopt[trl]`. A tiny model with random weights and words of its own: nothing is downloaded, and a CPU
suffices. `--lora` trains adapters of PEFT's alone.
"""

from __future__ import annotations

import argparse
import tempfile

import datasets
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from memopt.integrations.hf import MemoptCallback

WORDS = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(254))])}


def main() -> None:
    """Train two epochs, and print the losses and what was planned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--budget", default="100MB", help="as memopt.compile takes it: 20GB, 60%%; none: without memopt"
    )
    parser.add_argument("--backend", default=None, help="as memopt.compile takes it")
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    given = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    rows = torch.randint(0, 254, (32, 24)).tolist()
    limited = given.budget != "none"
    callbacks = [MemoptCallback(budget=given.budget, backend=given.backend)] if limited else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM(config),
            args=SFTConfig(
                folder,
                num_train_epochs=2,
                per_device_train_batch_size=8,
                learning_rate=1e-2,
                bf16=False,
                gradient_checkpointing=False,  # the budget says what is to be recomputed
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list([{"text": " ".join(f"w{word}" for word in row)} for row in rows]),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if given.lora else None,
            callbacks=callbacks,
        )
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(f"loss {entry['loss']:.6f}")
    for callback in callbacks:
        print(callback.report)


if __name__ == "__main__":
    main()
