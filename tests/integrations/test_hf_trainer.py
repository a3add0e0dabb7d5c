"""Hugging Face's Trainer as it is, with memopt beside itself without: the same losses, checkpoints and predictions."""

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.data import Dataset

import memopt

pytest.importorskip("accelerate", reason="make test-integrations installs it")
pytest.importorskip("transformers")
import transformers

from memopt.integrations.hf import MemoptCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

ROOT = str(Path(__file__).resolve().parents[2])


class Rows(Dataset):
    """Of token ids and one column that the model does not take; the last batch is smaller."""

    def __init__(self, size, labels):
        generator = torch.Generator().manual_seed(size)
        self.ids = torch.randint(0, 64, (size, 12), generator=generator)
        self.labels = self.ids if labels is None else torch.randint(0, labels, (size,), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        row = {"input_ids": self.ids[index], "attention_mask": torch.ones(12, dtype=torch.long)}
        return {**row, "labels": self.labels[index], "unused": self.ids[index]}


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
    )
    return transformers.BertForSequenceClassification(config)


def lora():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM"))


class Told(transformers.TrainerCallback):
    """What a user's callback is told of logs and evaluations, and at which step."""

    def __init__(self):
        self.entries = []

    def on_log(self, args, state, control, logs=None, **rest):
        self.entries.append((state.global_step, "log", sorted(logs)))

    def on_evaluate(self, args, state, control, metrics=None, **rest):
        self.entries.append((state.global_step, "evaluation", sorted(metrics)))


def trainer(make, how, folder, rows=43, budget="40MB", **options):
    model, callbacks = make(), []
    if how == "compile":
        model = memopt.compile(model, budget, backend="aten")
    if how == "callback":
        callbacks = [MemoptCallback(budget=budget, backend="aten")]
    usual = {"num_train_epochs": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    options = usual | {"logging_strategy": "epoch", "eval_strategy": "epoch"} | options
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        seed=1,
        **options,
    )
    labels = 2 if make is bert else None
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(rows, labels),
        eval_dataset=Rows(11, labels),
        callbacks=callbacks,
    )


def history(run):
    keys = ("loss", "eval_loss", "grad_norm", "epoch")
    return [{key: value for key, value in entry.items() if key in keys} for entry in run.state.log_history]


def assert_alike(found, expected, tolerance=1e-4):
    assert [sorted(entry) for entry in found] == [sorted(entry) for entry in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize("how", ["compile", "callback"])
def test_training_evaluation_checkpoints_and_resuming_are_those_of_the_trainer_alone(how, tmp_path):
    runs = {}
    for name in ("plain", how):
        run = trainer(gpt2, name, tmp_path / name, load_best_model_at_end=True, save_strategy="epoch")
        run.train()
        runs[name] = run
    plain, run = runs["plain"], runs[how]
    assert_alike(history(run), history(plain))
    assert (run.label_names, run.can_return_loss) == (plain.label_names, plain.can_return_loss)
    assert set(run._signature_columns) == set(plain._signature_columns)
    assert run.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs
    best = [os.path.basename(each.state.best_model_checkpoint) for each in (run, plain)]
    assert best[0] == best[1] and isinstance(run.model, transformers.PreTrainedModel)
    of_memopt = [each for each in run.callback_handler.callbacks if isinstance(each, MemoptCallback)]
    report = (run.model if how == "compile" else of_memopt[0]).report
    assert report.budget_bytes == 40 * 10**6
    if how == "callback":  # not of the evaluation that came last
        assert [program.kind for program in report.programs] == ["training"]
    predicted, expected = run.predict(Rows(11, None)), plain.predict(Rows(11, None))
    assert predicted.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-4)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(run.state.best_model_checkpoint)
    for key, value in run.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)
    prompt = torch.tensor([[1, 2, 3]])
    tokens = [each.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0) for each in (run, plain)]
    assert tokens[0].tolist() == tokens[1].tolist()
    resumed = {}
    for name in ("plain", how):
        resumed[name] = trainer(gpt2, name, tmp_path / name, num_train_epochs=3)
        resumed[name].train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-6"))
    assert_alike(history(resumed[how]), history(resumed["plain"]))


@pytest.mark.parametrize("how", ["compile", "callback"])
def test_evaluation_within_an_epoch_and_what_callbacks_are_told(how, tmp_path):
    often = {f"{name}_strategy": "steps" for name in ("logging", "eval", "save")}
    often |= {"logging_steps": 1, "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    runs, told = {}, {}
    for name in ("plain", how):
        runs[name], told[name] = trainer(gpt2, name, tmp_path / name, **often), Told()
        runs[name].add_callback(told[name])
        runs[name].train()
    run, plain = runs[how], runs["plain"]
    assert told[how].entries == told["plain"].entries and (2, "evaluation") in [each[:2] for each in told[how].entries]
    assert_alike(history(run), history(plain))
    best = [os.path.basename(each.state.best_model_checkpoint) for each in (run, plain)]
    assert best[0] == best[1]
    for key, value in plain.model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[key], value, rtol=1e-4, atol=1e-6)


RESUME = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.integrations.test_hf_trainer import gpt2, history, trainer
run = trainer(gpt2, "callback", sys.argv[1], save_strategy="epoch")
run.train(resume_from_checkpoint=sys.argv[1] + "/checkpoint-3")
print(json.dumps(history(run)))
"""


def test_another_process_resumes_from_a_checkpoint(tmp_path):
    runs = {}
    for name in ("plain", "callback"):
        runs[name] = trainer(gpt2, name, tmp_path / name, save_strategy="epoch")
        runs[name].train()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], ROOT])}
    command = [sys.executable, "-c", RESUME, str(tmp_path / "callback")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert_alike(json.loads(ended.stdout.splitlines()[-1]), history(runs["plain"]))


@pytest.mark.parametrize("how", ["compile", "callback"])
def test_autocast_and_label_smoothing(how, tmp_path):
    found = {}
    for name in ("plain", how):
        run = trainer(bert, name, tmp_path / name, bf16=True, label_smoothing_factor=0.1, save_strategy="no")
        run.train()
        found[name] = history(run)
    assert_alike(found[how], found["plain"], tolerance=2e-2)


@pytest.mark.parametrize("how", ["compile", "callback"])
def test_adapters_of_peft(how, tmp_path):
    found = {}
    for name in ("plain", how):
        run = trainer(lora, name, tmp_path / name, save_strategy="epoch")
        run.train()
        found[name] = history(run)
        assert "adapter_model.safetensors" in os.listdir(tmp_path / name / "checkpoint-6")
    assert_alike(found[how], found["plain"])


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x, labels=None):
        y = self.second(torch.relu(self.first(x)))
        return {"loss": (y - labels).square().mean(), "logits": y}


def test_tensorboard_gets_memory_and_plan(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=["tensorboard"], disable_tqdm=True, logging_steps=1, max_steps=3
    )
    callback = MemoptCallback(budget="1MB", backend="aten")
    rows = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(24)]
    transformers.Trainer(model=Wide(), args=arguments, train_dataset=rows, callbacks=[callback]).train()
    found = events.EventAccumulator(str(tmp_path / "logs"))
    found.Reload()
    (budget,) = found.Scalars("train/memopt/budget_bytes")
    assert budget.value == 10**6 and budget.step == 1
    assert found.Scalars("train/memopt/measured_peak_bytes")[0].value == callback.report.measured_peak_bytes
    assert len(found.Scalars("train/loss")) == 3


def rewrite(model):
    original = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, **inputs):
        self.latest = inputs["input_ids"].float().mean()
        torch._dynamo.graph_break()  # as TRL's loss makes one: all graphs are collected on fake tensors
        outputs = original(*args, **inputs)
        outputs.loss = outputs.loss * 2 + self.transformer.wte.weight.square().mean()
        return outputs

    model.forward = types.MethodType(forward, model)


def test_rewritten_methods_of_a_model_run_as_they_are_rewritten(tmp_path):
    """As TRL's trainers have it: their loss without logits is a `forward` of the very model, around its own."""
    losses = {}
    for how in ("plain", "callback"):
        run = trainer(gpt2, how, tmp_path / how, rows=8, num_train_epochs=2, gradient_accumulation_steps=1)
        rewrite(run.model)
        run.train()
        losses[how] = history(run)
        assert not is_fake(run.model.latest)
    assert_alike(losses["callback"], losses["plain"])


@pytest.mark.parametrize("how", ["compile", "callback"])
def test_a_batch_that_fits_the_budget_is_found(how, tmp_path):
    model = Wide()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=64,
        auto_find_batch_size=True,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    run = transformers.Trainer(
        model=memopt.compile(model, 30_000, backend="aten") if how == "compile" else model,
        args=arguments,
        train_dataset=[{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(64)],
        callbacks=[MemoptCallback(budget=30_000, backend="aten")] if how == "callback" else [],
    )
    run.train()
    assert 1 <= run._train_batch_size < 64 and run.state.global_step > 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_prepares_what_is_compiled_and_compiles_what_is_prepared(order):
    from accelerate import Accelerator

    losses = {}
    for name in ("plain", order):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if name == "before":
            model = memopt.compile(model, "40MB", optimizer=optimizer, backend="aten")
        model, optimizer = accelerator.prepare(model, optimizer)
        if name == "after":
            model = memopt.compile(model, "40MB", optimizer=optimizer, backend="aten")
        losses[name], ids = [], Rows(20, None).ids
        torch.manual_seed(1)
        for batch in [*ids.split(8), *ids.split(8)]:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses[name].append(loss.item())
        assert accelerator.unwrap_model(model).config.n_layer == 2
        assert isinstance(accelerator.unwrap_model(model), transformers.GPT2LMHeadModel)
    assert losses[order] == pytest.approx(losses["plain"], rel=1e-4)


def test_accelerate_knows_no_backends_but_its_own(tmp_path):
    """As the guide says; once it does, `torch_compile_backend="memopt"` is to be tried."""
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], torch_compile_backend="memopt", disable_tqdm=True
    )
    with pytest.raises(ValueError, match="not a valid DynamoBackend"):
        transformers.Trainer(model=Wide(), args=arguments, train_dataset=[])
