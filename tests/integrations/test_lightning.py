"""Lightning's Trainer as it is, with memopt beside itself without: the same losses, checkpoints and predictions."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import memopt
from memopt.in_place import stand_in_of

pytest.importorskip("lightning", reason="make test-integrations installs it")
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torchmetrics.classification import MulticlassAccuracy

from memopt.integrations.lightning import Memopt
from memopt.memory.reach import shown_tensors
from memopt.module import calls_of

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

BUDGET = "300kB"


class Auto(L.LightningModule):
    """The autoencoder of Lightning's first page, with what users' steps do: draw, log, return more than the loss."""

    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 32))
        self.losses, self.seen = [], 0

    def forward(self, x):
        return self.encoder(x)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("even", loss, prog_bar=True)
        self.log_dict({"train_loss": loss, "one": 1}, on_epoch=True)
        return {"loss": loss, "x": x}

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.seen += 1
        self.losses.append(self.trainer.callback_metrics.get("even", torch.zeros(())).item())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Counting(Auto):
    """Its step looks at the batch's number, and counts."""

    def training_step(self, batch, batch_idx):
        self.seen += 1
        if batch_idx % 2 == 0 and self.current_epoch < 9:
            self.log("odd", float(batch_idx))
        return super().training_step(batch, batch_idx)["loss"] * (1 + self.global_step)


class Adversaries(L.LightningModule):
    """Two networks, two optimizers, by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 32))
        self.judges = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))])

    def training_step(self, batch, batch_idx):
        (x,), (one, other) = batch, self.optimizers()
        made = self.generator(x[:, :4])
        judged = F.softplus(-self.judges[0](x)).mean() + F.softplus(self.judges[0](made.detach())).mean()
        other.zero_grad()
        self.manual_backward(judged)
        self.clip_gradients(other, gradient_clip_val=0.5)
        other.step()
        loss = F.softplus(-self.judges[0](made)).mean()
        one.zero_grad()
        self.manual_backward(loss)
        one.step()
        self.log_dict({"judged": judged, "train_loss": loss}, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.judges[0](self.generator(batch[0][:, :4])).mean())

    def configure_optimizers(self):
        nets = self.generator, self.judges
        return [torch.optim.Adam(net.parameters(), lr=1e-2) for net in nets]


class Deep(Auto):
    def __init__(self):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(3, 96), nn.GELU(), nn.Linear(96, 3)) for _ in range(4)]
        self.decoder.insert(0, nn.Sequential(*blocks))


def rows(count, size=8):
    data = TensorDataset(torch.randn(count, 32, generator=torch.Generator().manual_seed(count)))
    return DataLoader(data, batch_size=size)


def fit(module, folder, callbacks=(), resume=None, size=8, **options):
    checkpoints = ModelCheckpoint(str(folder), filename="{epoch}", monitor="val_loss", save_top_k=-1)
    options = {"max_epochs": 2, "logger": CSVLogger(str(folder), name="", version=""), "log_every_n_steps": 2} | options
    run = L.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints, *callbacks],
        **options,
    )
    torch.manual_seed(1)
    run.fit(module, rows(5 * size + 3, size), rows(11), ckpt_path=resume)
    return run


def metrics(run):
    return {name: value.item() for name, value in run.callback_metrics.items() if not name.startswith("memopt")}


def both(make, how, tmp_path, budget=BUDGET, **options):
    """The module and the run of each: without memopt, and with."""
    found = []
    for name in ("plain", how):
        module = make()
        callbacks = [Memopt(budget, backend="aten")] if name == "callback" else []
        given = memopt.compile(module, budget, backend="aten") if name == "compile" else module
        found.append((given, fit(given, tmp_path / name, callbacks, **options)))
    return found


def assert_alike(module, twin, tolerance=0.0):
    state, expected = module.state_dict(), twin.state_dict()
    assert list(state) == list(expected)
    for key, value in state.items():
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", ["callback", "compile"])
def test_training_evaluation_checkpoints_and_resuming_are_those_of_the_trainer_alone(how, tmp_path):
    (twin, plain), (module, run) = both(Auto, how, tmp_path)
    assert metrics(run) == metrics(plain)
    assert_alike(module, twin)
    assert (module.losses, module.seen) == (twin.losses, twin.seen) and module.seen == 12
    report = module.report if how == "compile" else run.callbacks[0].report
    assert report.budget_bytes == 300_000 and report.model == "Auto"
    assert [program.kind for program in report.programs] == ["training"]  # not of the evaluation that came last
    assert report.measured_peak_bytes is not None
    assert isinstance(module, Auto) and not hasattr(module, "_memopt_logged")
    for each in (run, plain):
        each.test(each.lightning_module, rows(11), verbose=False)
    assert metrics(run) == metrics(plain)
    for one, other in zip(*(each.predict(each.lightning_module, rows(11)) for each in (run, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    path = tmp_path / how / "epoch=0.ckpt"
    saved, expected = (torch.load(tmp_path / name / "epoch=0.ckpt", weights_only=False) for name in (how, "plain"))
    assert saved.keys() == expected.keys() and list(saved["state_dict"]) == list(expected["state_dict"])
    loaded = Auto.load_from_checkpoint(path)
    torch.testing.assert_close(loaded.encoder[0].weight, expected["state_dict"]["encoder.0.weight"], rtol=0, atol=0)
    resumed = []
    for name in ("plain", how):
        fresh = Auto()
        callbacks = [Memopt(BUDGET, backend="aten")] if name == "callback" else []
        given = memopt.compile(fresh, BUDGET, backend="aten") if name == "compile" else fresh
        fit(given, tmp_path / f"{name}-resumed", callbacks, resume=str(tmp_path / name / "epoch=0.ckpt"))
        resumed.append(given)
    assert resumed[0].seen == 6
    assert_alike(resumed[1], resumed[0])


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
        {"precision": "64-true", "gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"max_epochs": 10, "num_sanity_val_steps": 0},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_trainers_are_asked_for(options, tmp_path):
    (twin, plain), (module, run) = both(Auto, "callback", tmp_path, **options)
    tolerance = 2e-2 if options.get("precision") == "bf16-mixed" else 1e-6
    assert metrics(run) == pytest.approx(metrics(plain), rel=tolerance)
    assert_alike(module, twin, tolerance)


def test_a_fraction_is_of_the_training_step_and_the_budget_holds_to_the_end(tmp_path):
    callback, peaks = Memopt(0.8, backend="aten"), {}

    class Peak(L.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.fit_loop.epoch_loop.automatic_optimization.run = self.measured(trainer, pl_module)

        def measured(self, trainer, pl_module):
            run = trainer.fit_loop.epoch_loop.automatic_optimization.run

            def measured_run(*args):
                if not 7 <= trainer.global_step < 11:
                    return run(*args)
                tensors = [t for p in pl_module.parameters() for t in (p, p.grad) if t is not None]
                tensors += [t for o in trainer.optimizers for s in o.state.values() for t in s.values()]
                tensors += shown_tensors(args[-1])  # the batch
                held = sum(tensor.nbytes for tensor in tensors)
                found = []
                peak = memopt.measure(lambda: found.append(run(*args))).peak_bytes
                peaks.setdefault(id(pl_module), []).append(held + peak)
                return found[0]

            return measured_run

    modules = []
    for callbacks in ([], [callback]):
        module = Deep()
        modules.append(module)
        fit(module, tmp_path / str(len(callbacks)), [*callbacks, Peak()], size=256)
    plain, planned = (max(peaks[id(module)]) for module in modules)
    assert callback.report.budget_bytes <= 0.8 * plain * 1.02
    assert planned <= callback.report.budget_bytes
    assert_alike(*modules)


@pytest.mark.parametrize("how", ["callback", "compile"])
def test_steps_that_count_are_compiled_by_their_networks(how, tmp_path):
    (twin, plain), (module, run) = both(Counting, how, tmp_path)
    assert metrics(run) == pytest.approx(metrics(plain), rel=1e-6)
    assert_alike(module, twin, 1e-6)
    assert module.seen == twin.seen and stand_in_of(module.encoder).report.breakdown.optimizer_state > 0
    report = module.report if how == "compile" else run.callbacks[0].report
    assert report.budget_bytes == 300_000  # of all networks of the step
    if how == "callback":  # another run begins with whole steps again
        fit(module, tmp_path / "again", [Memopt(BUDGET, backend="aten")], max_epochs=1)
        fit(twin, tmp_path / "twin", max_epochs=1)
        assert_alike(module, twin, 1e-6)


def test_several_optimizers_by_hand(tmp_path):
    (twin, plain), (module, run) = both(Adversaries, "callback", tmp_path)
    assert metrics(run) == metrics(plain)
    assert_alike(module, twin)
    parts = [stand_in_of(part) for part in (module.generator, module.judges[0])]
    assert all(part.report.breakdown.optimizer_state > 0 for part in parts)
    assert all(part.report.budget_bytes == 300_000 for part in parts)  # of both, which know of each other
    assert len({id(calls_of(part).sessions.group) for part in parts}) == 1
    run.callbacks[0].undo()
    assert stand_in_of(module.generator) is None
    with pytest.raises(ValueError, match="2 modules by hand"):
        fit(Adversaries(), tmp_path, [Memopt(0.5)])
    bare = Adversaries()
    bare.generator = bare.judges = None
    bare.weight = nn.Parameter(torch.ones(3))
    bare.configure_optimizers = lambda: torch.optim.SGD([bare.weight], 0.1)
    with pytest.raises(TypeError, match="holds its parameters itself"):
        fit(bare, tmp_path, [Memopt(BUDGET)])


class Inside(Auto):
    """A network that the user compiles."""

    how = None

    def __init__(self):
        super().__init__()
        if self.how == "init":
            self.decoder = memopt.compile(self.decoder, BUDGET, backend="aten")

    def configure_model(self):
        if self.how == "configure_model" and not hasattr(self.decoder, "report"):
            self.decoder = memopt.compile(self.decoder, BUDGET, backend="aten")


@pytest.mark.parametrize("how", ["init", "configure_model"])
@pytest.mark.parametrize("callback", [False, True])
def test_a_network_that_is_compiled_within_the_module(how, callback, tmp_path, monkeypatch):
    runs = []
    for each in (None, how):
        monkeypatch.setattr(Inside, "how", each)
        module = Inside()
        fit(module, tmp_path / str(each), [Memopt(BUDGET, backend="aten")] if callback and each else [])
        runs.append(module)
    assert_alike(runs[1], runs[0])
    loaded = Inside.load_from_checkpoint(tmp_path / how / "epoch=1.ckpt")
    assert_alike(loaded, runs[0])
    if not callback:
        assert runs[1].decoder.report.budget_bytes == 300_000


class Measured(Auto):
    """Its step updates a metric of torchmetrics, of which each has several graphs and tensors in plain attributes."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        y = self.decoder(self.encoder(x))
        self.accuracy(y[:, :4], x[:, :4].argmax(-1))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.mse_loss(y, x)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_metrics_count_each_step_once(backend, tmp_path):
    runs = []
    for callbacks in ([], [Memopt("1MB", backend=backend)]):
        module = Measured()
        module.encoder[2] = nn.Identity()  # Inductor's dropout draws other numbers
        run = L.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        torch.manual_seed(1)
        run.fit(module, rows(19))
        runs.append((module, metrics(run)))
    (twin, expected), (module, found) = runs
    assert found["accuracy_epoch"] == expected["accuracy_epoch"] and len(found) == len(expected)
    assert_alike(module, twin, 1e-5)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_training_and_evaluation_are_planned_in_the_first_epoch_alone(precision, tmp_path):
    counts = []

    class Count(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):  # its evaluation is over
            counts.append(calls_of(stand_in_of(pl_module)).sessions.graphs)

    module = Auto()
    fit(module, tmp_path, [Memopt(BUDGET, backend="aten"), Count()], max_epochs=4, precision=precision)
    assert len(counts) == 4 and counts[0] > 2 and len(set(counts)) == 1


def test_loggers_get_memory_and_plan(tmp_path):
    module, callback = Auto(), Memopt(BUDGET, backend="aten")
    run = fit(module, tmp_path, [callback])
    text = (tmp_path / "metrics.csv").read_text()
    assert "memopt/measured_peak_bytes" in text and "memopt/budget_bytes" in text and "train_loss" in text
    assert "300000.0" in text
    again = pickle.loads(pickle.dumps(module))
    for other in (copy.deepcopy(module), again):
        assert type(other) is Auto
        assert_alike(other, module)
    callback.undo()
    assert type(module) is Auto
    fit(module, tmp_path / "again")
    assert run.callbacks[0] is callback


def test_a_budget_that_nothing_keeps_is_refused_before_a_step(tmp_path):
    module = Auto()
    with pytest.raises(memopt.BudgetError, match="no plan fits") as refused:
        fit(module, tmp_path, [Memopt("50kB", backend="aten")])
    assert refused.value.minimum_bytes > 50_000 and module.seen == 0


def test_what_the_callback_does_not_understand_is_refused_when_it_is_made():
    with pytest.raises(ValueError, match="what"):
        Memopt(budget="20")
    with pytest.raises(TypeError, match="leave optimizer"):
        Memopt(budget="1MB", optimizer=torch.optim.SGD)
    with pytest.raises(RuntimeError, match="nothing is compiled"):
        _ = Memopt().report
