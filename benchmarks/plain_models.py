"""Ten models in plain torch, written as users write them, each with the inputs of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 8


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        states, _ = self.lstm(self.embedding(ids))
        logits = self.head(states[:, -1])
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class GRUTranslator(nn.Module):
    """Encoder and decoder cell, with the target fed in word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(60, 16), nn.Embedding(60, 16)
        self.encoder, self.cell = nn.GRU(16, 24, batch_first=True), nn.GRUCell(16, 24)
        self.head = nn.Linear(24, 60)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        _, state = self.encoder(self.source(ids))
        state, logits = state[-1], []
        for word in self.target(labels).unbind(1):
            state = self.cell(word, state)
            logits.append(self.head(state))
        every = torch.stack(logits, 1)
        return functional.cross_entropy(every[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), every


class Block(nn.Module):
    def __init__(self, old: int, new: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(old, new, 3, padding=1, bias=False), nn.BatchNorm2d(new), nn.ReLU(inplace=True),
            nn.Conv2d(new, new, 3, padding=1, bias=False), nn.BatchNorm2d(new), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.low = Block(3, 8), Block(8, 16), Block(16, 32)
        self.up_two, self.up_one = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.back_two, self.back_one, self.head = Block(32, 16), Block(16, 8), nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        one = self.one(images)
        two = self.two(functional.max_pool2d(one, 2))
        low = self.low(functional.max_pool2d(two, 2))
        back = self.back_two(torch.cat([two, self.up_two(low)], 1))
        logits = self.head(self.back_one(torch.cat([one, self.up_one(back)], 1)))
        return functional.cross_entropy(logits, labels), logits


class Residual(nn.Module):
    def __init__(self, old: int, new: int) -> None:
        super().__init__()
        self.body, self.skip = Block(old, new), nn.Conv2d(old, new, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.skip(x)
        out += self.body(x)
        return functional.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Residual(3, 8), nn.MaxPool2d(2), Residual(8, 16), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.body(images).flatten(1))
        return functional.cross_entropy(logits, labels[:, 0, 0]), logits


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU())
        self.moments, self.back = nn.Linear(16 * 16, 16), nn.Linear(8, 16 * 16)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))

    def forward(self, images: Tensor) -> Any:
        mean, deviation = self.moments(self.encoder(images).flatten(1)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (deviation * 0.5).exp()
        again = self.decoder(self.back(code).unflatten(1, (16, 4, 4)))
        divergence = -0.5 * (1 + deviation - mean.square() - deviation.exp()).mean()
        return {"loss": functional.mse_loss(again, images) + divergence, "images": again, "code": mean.detach()}


class GAN(nn.Module):
    """Both players in one module: the discriminator's loss sees the detached image, the generator's the image."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 3 * 256), nn.Tanh())
        norm = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.Sequential(norm(nn.Linear(3 * 256, 32)), nn.LeakyReLU(0.2), norm(nn.Linear(32, 1)))

    def forward(self, images: Tensor, noise: Tensor) -> Any:
        made = self.generator(noise)
        real, fake = self.discriminator(images.flatten(1)), self.discriminator(made.detach())
        loss = functional.softplus(-real).mean() + functional.softplus(fake).mean()
        return loss + functional.softplus(-self.discriminator(made)).mean(), made


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(8 * 49, 16))

    def forward(self, images: Tensor, others: Tensor) -> Any:
        a, b = self.tower(images), self.tower(others)
        return functional.triplet_margin_loss(a, b, b.roll(1, 0), margin=0.5), a, b


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 60)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        mask = self.transformer.generate_square_subsequent_mask(labels.shape[1])
        states = self.transformer(self.embedding(ids), self.embedding(labels), tgt_mask=mask, tgt_is_causal=True)
        logits = self.head(states)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(3 + 6 * i), nn.ReLU(), nn.Conv2d(3 + 6 * i, 6, 3, padding=1)) for i in range(4)
        )
        self.head = nn.Linear(27, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        features = [images]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        logits = self.head(torch.cat(features, 1).mean((2, 3)))
        return functional.cross_entropy(logits, labels[:, 0, 0]), logits


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(5))
        self.places = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.channels = nn.ModuleList(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2))
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Any:
        x = self.patches(images).flatten(2).mT
        for i, (places, channels) in enumerate(zip(self.places, self.channels, strict=True)):
            x = x + places(self.norms[2 * i](x).mT).mT
            x = x + channels(self.norms[2 * i + 1](x))
        logits = self.head(self.norms[4](x).mean(1))
        return functional.cross_entropy(logits, labels[:, 0, 0]), logits


MODELS = {
    model.__name__: model
    for model in (LSTMClassifier, GRUTranslator, UNet, ResNet, VAE, GAN, Siamese, Translator, DenseNet, Mixer)
}


def names() -> list[str]:
    return list(MODELS)


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model under a fixed seed, and keyword arguments for a step."""
    torch.manual_seed(0)
    model = MODELS[name]()
    images = {"images": torch.randn(BATCH, 3, 16, 16), "labels": torch.randint(0, 4, (BATCH, 16, 16))}
    words = {"ids": torch.randint(0, 60, (BATCH, 12)), "labels": torch.randint(0, 60, (BATCH, 10))}
    inputs: dict[str, dict[str, Any]] = {
        "LSTMClassifier": {"ids": words["ids"], "labels": torch.randint(0, 5, (BATCH,))},
        "GRUTranslator": words,
        "Translator": words,
        "VAE": {"images": images["images"]},
        "GAN": {"images": images["images"], "noise": torch.randn(BATCH, 8)},
        "Siamese": {"images": images["images"], "others": torch.randn(BATCH, 3, 16, 16)},
    }
    return model, inputs.get(name, images)
