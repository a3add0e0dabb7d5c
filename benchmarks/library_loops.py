"""Loops of training libraries on a GPU: what the whole process reserves, beside the library alone.

GPT-2 of transformers in bf16, with AdamW, clipping, evaluation between steps and a smaller last batch: by Lightning, by
accelerate with accumulation, and by Hugging Face's Trainer. Each row is a process of its own; a budget is a share of
what the library alone reserves. What is reserved is the most of the process's whole life, planning included.

python benchmarks/library_loops.py --json library_loops.json
python benchmarks/library_loops.py --tiny
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memopt

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.render_loops import library_table  # noqa: E402 - found once the root is on the path

RATE = 1e-4
Step = Callable[[], None]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in each process."""

    def __init__(self, count: int, length: int, words: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, words, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Sizes:
    """Of the model and its loop."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.batch, self.length = tiny, 4 if tiny else 12, 64 if tiny else 1024
        self.model = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512} if tiny else {"n_layer": 12}
        self.engine = "aten" if tiny else "inductor"
        words = 512 if tiny else 50257
        self.train = Rows(10 * self.batch + self.batch // 2, self.length, words, 0)
        self.evaluated = Rows(2 * self.batch + 1, self.length, words, 1)

    def made(self) -> nn.Module:
        """The model, without dropout, so that losses can be compared."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**self.model, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))

    def loaders(self) -> tuple[Any, Any]:
        """Of training rows, in order, and of evaluated ones."""
        return DataLoader(self.train, self.batch), DataLoader(self.evaluated, self.batch)


def lightning(sizes: Sizes, budget: int | None, losses: list[float], done: Step) -> None:
    """Lightning's Trainer, with memopt's callback."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = sizes.made()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", self.model(**batch).loss)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            losses.append(float(outputs["loss"]))
            done()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), RATE)

    callbacks = []
    if budget is not None:
        from memopt.integrations.lightning import Memopt

        callbacks.append(Memopt(budget=budget, backend=sizes.engine))
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=2,
            precision="32-true" if sizes.tiny else "bf16-mixed",
            accelerator="cpu" if sizes.tiny else "gpu",
            devices=1,
            gradient_clip_val=1.0,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=1,
            default_root_dir=folder,
        )
        trainer.fit(Module(), *sizes.loaders())


def accelerate(sizes: Sizes, budget: int | None, losses: list[float], done: Step) -> None:
    """A loop with accelerate: two batches a step, evaluation at the end of an epoch."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=2, mixed_precision="no" if sizes.tiny else "bf16", cpu=sizes.tiny
    )
    model = sizes.made()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    if budget is not None:
        model = memopt.compile(model, budget=budget, optimizer=optimizer, backend=sizes.engine)
    train, evaluated = sizes.loaders()
    model, optimizer, train, evaluated = accelerator.prepare(model, optimizer, train, evaluated)
    for _ in range(2):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            done()
        model.eval()
        with torch.no_grad():
            for batch in evaluated:
                model(**batch)


def trainer(sizes: Sizes, budget: int | None, losses: list[float], done: Step) -> None:
    """Hugging Face's Trainer, with memopt's callback."""
    import transformers

    class Look(transformers.TrainerCallback):
        def on_step_end(self, *rest: Any, **named: Any) -> None:
            done()

    callbacks: list[Any] = [Look()]
    if budget is not None:
        from memopt.integrations.hf import MemoptCallback

        callbacks.append(MemoptCallback(budget, backend=sizes.engine))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=sizes.batch,
            per_device_eval_batch_size=sizes.batch,
            learning_rate=RATE,
            bf16=not sizes.tiny,
            use_cpu=sizes.tiny,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="no",
            seed=1,
        )
        made = transformers.Trainer(
            model=sizes.made(),
            args=arguments,
            callbacks=callbacks,
            train_dataset=sizes.train,
            eval_dataset=sizes.evaluated,
        )
        made.train()
        losses += [entry["loss"] for entry in made.state.log_history if "loss" in entry]


LOOPS = {"lightning": lightning, "accelerate": accelerate, "trainer": trainer}


def row(name: str, budget: int | None, tiny: bool) -> dict[str, Any]:
    """One loop in this process: bytes reserved in all, seconds of its first step and of a usual one, and losses."""
    sizes, losses, ends = Sizes(tiny), list[float](), [time.perf_counter()]

    def done() -> None:
        if not tiny:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())

    LOOPS[name](sizes, budget, losses, done)
    steps = [after - before for before, after in itertools.pairwise(ends[1:])]
    return {
        "reserved": 0 if tiny else torch.cuda.max_memory_reserved(),
        "first": ends[1] - ends[0],
        "step": statistics.median(steps),
        "losses": losses,
        "device": "cpu" if tiny else torch.cuda.get_device_name(),
    }


def run(name: str, budget: int | None, tiny: bool, seconds: float) -> dict[str, Any]:
    """The same in a process of its own, with caches of its own."""
    with tempfile.TemporaryDirectory() as caches:
        variables = {
            "MEMOPT_CACHE_DIR": caches,
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-W", "ignore", __file__, "--row", name, "--budget", str(budget or 0)]
        try:
            ended = subprocess.run(
                [*command, *(["--tiny"] if tiny else [])],
                capture_output=True,
                text=True,
                timeout=seconds,
                env={**os.environ, **variables},
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {seconds:.0f} s"}
        if ended.returncode:
            return {"failed": (ended.stderr.strip().splitlines() or ["no word"])[-1]}
        found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all rows, those without memopt first, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--share", type=float, default=0.6, help="of what the library alone reserves")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, within 100 MB")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=300, help="of a row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.row:
        print(json.dumps(row(given.row, given.budget or None, given.tiny)))
        return
    names, rows = given.loops.split(","), dict[str, dict[str, Any]]()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for name, found in zip(names, pool.map(lambda n: run(n, None, given.tiny, given.seconds), names), strict=True):
            rows[name] = found
        budgets = {n: 100_000_000 if given.tiny else int(given.share * rows[n].get("reserved", 0)) for n in names}
        wanted = [name for name in names if "failed" not in rows[name]]
        found_rows = pool.map(lambda name: run(name, budgets[name], given.tiny, given.seconds), wanted)
        for name, found in zip(wanted, found_rows, strict=True):
            rows[f"{name}:{given.share:g}"] = {**found, "budget": budgets[name]}
    machine = next((found.pop("device") for found in rows.values() if "device" in found), "no row has run")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "lightning", "accelerate")}
    result = {
        "machine": machine,
        "versions": versions,
        "settings": {"share": given.share, "jobs": given.jobs},
        "rows": [{"row": name, **found} for name, found in rows.items()],
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(library_table(result), end="")


if __name__ == "__main__":
    main()
