"""TRL's trainers with memopt beside themselves without: their losses without logits are rewritten `forward`s."""

import copy

import pytest
import torch

pytest.importorskip("trl", reason="make test-integrations installs it")
import datasets
import transformers
import trl
import trl.trainer.utils
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers

from memopt.integrations.hf import MemoptCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

WORDS = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{number}" for number in range(62))])}


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=len(WORDS), **special))


def words():
    made = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def rows(trainer):
    drawn = torch.Generator().manual_seed(0)

    def text(size):
        return " ".join(f"w{number}" for number in torch.randint(0, 62, (size,), generator=drawn).tolist())

    if trainer == "sft":
        return datasets.Dataset.from_list([{"text": text(6 + number % 3)} for number in range(11)])
    pairs = [{"prompt": text(4) + " ", "chosen": text(6), "rejected": text(4 + number % 3)} for number in range(11)]
    return datasets.Dataset.from_list(pairs)


def trained(trainer, callbacks, folder, *, bf16=False, lora=False):
    """What a trainer logs of each step of two epochs, the last batch smaller."""
    kind, arguments = {"sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig)}[trainer]
    model = llama()
    # With adapters the reference is the model without them, called within the step.
    reference = {"ref_model": copy.deepcopy(model)} if trainer == "dpo" and not lora else {}
    run = kind(
        model=model,
        args=arguments(
            str(folder), num_train_epochs=2, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=bf16,
        ),
        train_dataset=rows(trainer),
        processing_class=words(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
        callbacks=callbacks,
        **reference,
    )  # fmt: skip
    run.train()
    return [(entry["loss"], entry["grad_norm"]) for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("trainer", "options"),
    [("sft", {}), ("sft", {"bf16": True}), ("sft", {"lora": True}), ("dpo", {}), ("dpo", {"lora": True})],
    ids=["sft", "sft-bf16", "sft-lora", "dpo", "dpo-lora"],
)
def test_losses_and_gradients_are_those_of_the_trainer_alone(trainer, options, tmp_path):
    callback = MemoptCallback(budget="40MB", backend="aten")
    alone = trained(trainer, [], tmp_path, **options)
    found = trained(trainer, [callback], tmp_path, **options)
    assert len(found) == len(alone) == 6
    for one, other in zip(found, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-2 if options.get("bf16") else 1e-5)
    assert callback.report.measured_peak_bytes <= 40 * 10**6
    assert "training" in [program.kind for program in callback.report.programs]  # not of the reference's calls


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_vocabularies_of_several_tiles(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 24)  # of 64 words; 32,768 of real ones
    alone = trained(trainer, [], tmp_path)
    callback = MemoptCallback(budget="40MB", backend="aten")
    for one, other in zip(trained(trainer, [callback], tmp_path), alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert "training" in [program.kind for program in callback.report.programs]
