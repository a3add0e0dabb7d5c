"""The loops, by name: two epochs with evaluation and checkpoints, then the first checkpoint resumed for two more.

Each takes the budget in bytes (None: without memopt) and returns what was logged, and the peaks of its epochs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import memopt
from benchmarks.integrations.data import ACCUMULATED, BATCH, ROWS, STEPS, WORDS, Rows, gpt2, llama, with_adapters
from benchmarks.integrations.watch import Watch
from benchmarks.storages import storages

RATE = 3e-3


@dataclasses.dataclass
class Asked:
    """What a run is asked for.

    Attributes:
        budget: in bytes; None: without memopt.
        bf16: whether the loop runs under autocast.
        engine: of memopt.
        folder: for checkpoints.
    """

    budget: int | None
    bf16: bool
    engine: str
    folder: Path


@dataclasses.dataclass
class Found:
    """What a run said and took.

    Attributes:
        losses: of training and evaluation, as the library logs them, in order.
        peaks: bytes of each piece that was looked at.
        notes: of memopt's report, one line each.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


Loop = Callable[[Asked, Found, Any], None]


# -- Hugging Face's Trainer, with PEFT, and TRL's ---------------------------------------------------------------------


def _trained(asked: Asked, found: Found, make: Callable[..., Any]) -> None:
    """Two epochs, then from the first checkpoint to the end of a third; `make` takes epochs and callbacks."""
    import transformers

    from memopt.integrations.hf import MemoptCallback

    for epochs, resumed in ((2, None), (3, str(asked.folder / f"checkpoint-{STEPS}"))):
        beside = frozenset(storages())
        watch, begun = Watch(STEPS, beside), 0 if resumed is None else STEPS

        class Look(transformers.TrainerCallback):
            def on_step_begin(
                self, args: Any, state: Any, *rest: Any, _watch: Watch = watch, _begun: int = begun, **named: Any
            ) -> None:
                _watch.step(state.global_step - _begun)

            def on_step_end(
                self, args: Any, state: Any, *rest: Any, _watch: Watch = watch, _begun: int = begun, **named: Any
            ) -> None:
                _watch.step_done(state.global_step - _begun - 1)

        callback = None if asked.budget is None else MemoptCallback(asked.budget, backend=asked.engine)
        trainer = make(epochs, [*([] if callback is None else [callback]), Look()])
        with watch:
            trainer.train(resume_from_checkpoint=resumed)
        found.losses += [
            entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry
        ]
        found.peaks += watch.peaks
        if callback is not None:
            found.notes += callback.report.notes
        del trainer, callback


def _arguments(asked: Asked, epochs: int) -> dict[str, Any]:
    return {
        "output_dir": str(asked.folder),
        "num_train_epochs": epochs,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "learning_rate": RATE,
        "bf16": asked.bf16,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "seed": 1,
    }


def _trainer(asked: Asked, found: Found, model: Callable[[], Any]) -> None:
    import transformers

    def make(epochs: int, callbacks: list[Any]) -> Any:
        arguments = transformers.TrainingArguments(**_arguments(asked, epochs))
        rows = {"train_dataset": Rows(ROWS, 0), "eval_dataset": Rows(BATCH + 3, 1)}
        return transformers.Trainer(model=model(), args=arguments, callbacks=callbacks, **rows)

    _trained(asked, found, make)


def trainer(asked: Asked, found: Found) -> None:
    """Hugging Face's Trainer."""
    _trainer(asked, found, gpt2)


def peft(asked: Asked, found: Found) -> None:
    """Adapters of PEFT's in Hugging Face's Trainer."""
    _trainer(asked, found, lambda: with_adapters(gpt2()))


def trl(asked: Asked, found: Found) -> None:
    """TRL's SFTTrainer with its own loss."""
    import datasets
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def rows(size: int, seed: int) -> Any:
        return datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in Rows(size, seed).ids])

    def make(epochs: int, callbacks: list[Any]) -> Any:
        return SFTTrainer(
            model=llama(),
            args=SFTConfig(**_arguments(asked, epochs), gradient_checkpointing=False),
            train_dataset=rows(ROWS, 0),
            eval_dataset=rows(BATCH + 3, 1),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1"),
            callbacks=callbacks,
        )

    _trained(asked, found, make)


# -- Lightning --------------------------------------------------------------------------------------------------------


def lightning(asked: Asked, found: Found) -> None:
    """Lightning's Trainer."""
    import lightning as library
    from lightning.pytorch.callbacks import ModelCheckpoint

    from memopt.integrations.lightning import Memopt

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt2()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.log("loss", loss, on_step=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("eval_loss", self.net(**batch).loss)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    for epochs, resumed in ((2, None), (3, str(asked.folder / "epoch=0.ckpt"))):
        watch, begun = Watch(STEPS, frozenset(storages())), 0 if resumed is None else STEPS

        class Look(library.Callback):
            def on_train_batch_start(self, run: Any, *rest: Any, _watch: Watch = watch, _begun: int = begun) -> None:
                if rest[-1] % ACCUMULATED == 0:
                    _watch.step(run.global_step - _begun)

            def on_train_batch_end(
                self,
                run: Any,
                module: Any,
                outputs: Any,
                batch: Any,
                number: int,
                _watch: Watch = watch,
                _begun: int = begun,
            ) -> None:
                found.losses.append(outputs["loss"].item())
                if number % ACCUMULATED:
                    _watch.step_done(run.global_step - _begun - 1)

            def on_validation_end(self, run: Any, module: Any) -> None:
                found.losses.append(run.callback_metrics["eval_loss"].item())

        callback = None if asked.budget is None else Memopt(asked.budget, backend=asked.engine)
        saved = ModelCheckpoint(str(asked.folder), filename="{epoch}", save_top_k=-1)
        run = library.Trainer(
            accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=ACCUMULATED, logger=False,
            precision="bf16-mixed" if asked.bf16 else "32-true", enable_progress_bar=False, num_sanity_val_steps=0,
            enable_model_summary=False, callbacks=[*([] if callback is None else [callback]), saved, Look()],
        )  # fmt: skip
        torch.manual_seed(1)
        with watch:
            run.fit(
                Module(), DataLoader(Rows(ROWS, 0), BATCH), DataLoader(Rows(BATCH + 3, 1), BATCH), ckpt_path=resumed
            )
        found.peaks += watch.peaks
        if callback is not None:
            found.notes += callback.report.notes
        del run, callback


# -- accelerate -------------------------------------------------------------------------------------------------------


def _accelerated(asked: Asked, found: Found, before: bool) -> None:
    import accelerate

    for epochs, resumed in (((0, 1), False), ((1, 2), True)):
        watch, number = Watch(STEPS, frozenset(storages())), 0
        library = accelerate.Accelerator(
            cpu=True, mixed_precision="bf16" if asked.bf16 else "no", gradient_accumulation_steps=ACCUMULATED
        )
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

        def planned(model: Any, optimizer: Any) -> Any:
            if asked.budget is None:
                return model
            return memopt.compile(model, asked.budget, optimizer=optimizer, backend=asked.engine)

        if before:
            model = planned(model, optimizer)
        loaders = [DataLoader(Rows(size, seed), BATCH) for size, seed in ((ROWS, 0), (BATCH + 3, 1))]
        model, optimizer, train, held_out = library.prepare(model, optimizer, *loaders)
        if not before:
            model = planned(model, optimizer)
        if resumed:
            library.load_state(str(asked.folder / "epoch-0"))
        torch.manual_seed(1)
        with watch:
            for epoch in epochs:
                model.train()
                for place, batch in enumerate(train):
                    if place % ACCUMULATED == 0:
                        watch.step(number)
                    with library.accumulate(model):
                        loss = model(**batch).loss
                        library.backward(loss)
                        if library.sync_gradients:
                            library.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad()
                    found.losses.append(loss.item())
                    if library.sync_gradients:
                        watch.step_done(number)
                        number += 1
                model.eval()
                with torch.no_grad():
                    found.losses += [
                        library.gather_for_metrics(model(**batch).loss).mean().item() for batch in held_out
                    ]
                if not resumed:
                    library.save_state(str(asked.folder / f"epoch-{epoch}"))
        found.peaks += watch.peaks
        if asked.budget is not None:
            found.notes += library.unwrap_model(model).report.notes
        library.free_memory()
        del model, optimizer, train, held_out, loaders, batch, loss


def accelerate_before(asked: Asked, found: Found) -> None:
    """A loop of accelerate's, the model compiled before `prepare`."""
    _accelerated(asked, found, before=True)


def accelerate_after(asked: Asked, found: Found) -> None:
    """A loop of accelerate's, the model compiled after `prepare`."""
    _accelerated(asked, found, before=False)


LOOPS: dict[str, Callable[[Asked, Found], None]] = {
    "trainer": trainer,
    "peft": peft,
    "trl": trl,
    "lightning": lightning,
    "accelerate-before": accelerate_before,
    "accelerate-after": accelerate_after,
}
