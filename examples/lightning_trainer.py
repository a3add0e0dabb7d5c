"""Train within a memory budget in Lightning's Trainer: `python examples/lightning_trainer.py --budget 60%`.

Needs `pip install memopt[lightning]`. Random data, so that nothing is downloaded and a CPU suffices.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memopt.integrations.lightning import Memopt


class Autoencoder(L.LightningModule):
    """The autoencoder of Lightning's first page, wide enough that its activations count."""

    def __init__(self) -> None:
        """Make both networks."""
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 256))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which memopt counts."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train two epochs and print what was planned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%", help="as memopt.compile takes it: 20GB, 60%%")
    callback = Memopt(budget=parser.parse_args().budget)
    loader = DataLoader(TensorDataset(torch.randn(4096, 256)), batch_size=1024)
    settings = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    L.Trainer(max_epochs=2, accelerator="auto", devices=1, callbacks=[callback], **settings).fit(Autoencoder(), loader)
    print(callback.report)


if __name__ == "__main__":
    main()
