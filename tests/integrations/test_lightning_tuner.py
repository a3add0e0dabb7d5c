"""Lightning's searches for a rate and for a batch that fits take their steps as planned, though they drop callbacks."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memopt.in_place import stand_in_of

pytest.importorskip("lightning", reason="make test-integrations installs it")
import lightning as L
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner

from memopt.integrations.lightning import Memopt

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lr, self.batch_size, self.planned = 1e-3, 64, []
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.planned.append(stand_in_of(self) is not None)

    def train_dataloader(self):
        rows = torch.randn(8192, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), self.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def run(folder, callbacks):
    return L.Trainer(
        default_root_dir=str(folder), max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip


@pytest.mark.parametrize("how", ["tuner", "callback"])
def test_a_rate_is_searched_for_in_planned_steps(how, tmp_path):
    found = []
    for callbacks in ([], [Memopt("2MB", backend="aten")]):
        module = Net()
        if how == "tuner":
            trainer = run(tmp_path, callbacks)
            Tuner(trainer).lr_find(module, num_training=6, early_stop_threshold=None)
        else:
            trainer = run(tmp_path, [LearningRateFinder(num_training_steps=6, early_stop_threshold=None), *callbacks])
            trainer.fit(module)
        assert len(module.planned) >= 6 and all(planned == bool(callbacks) for planned in module.planned)
        found.append(module.lr)
    assert found[1] == found[0]


def test_a_batch_is_searched_for_that_fits_the_budget(tmp_path):
    module, callback = Net(), Memopt("400kB", backend="aten")
    trainer = run(tmp_path, [callback])
    size = Tuner(trainer).scale_batch_size(module, init_val=128, max_trials=4)
    assert 128 <= size < 128 * 2**4 and all(module.planned)
    trainer.fit(module)
    assert callback.report.measured_peak_bytes <= 400_000
