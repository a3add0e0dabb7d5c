"""Families of lines in `forward` that users' models are made of: blocks, checkpoints, parts that run eagerly."""

from __future__ import annotations

from tests.modules import statements
from tests.modules.writer import Writer


def block(w: Writer) -> None:
    """Layers in a row, perhaps within a checkpoint."""
    x = w.pick(lambda v: v.dim() > 1 and v.shape[-1] <= 8)
    if x is None:
        return
    size = w.value(x).shape[-1]
    inner = w.choose(
        ("nn.GELU()", "nn.Tanh()", "nn.ReLU(inplace=True)", f"nn.LayerNorm({size * 2})", "nn.Dropout(0.2)")
    )
    layer = w.module(f"nn.Sequential(nn.Linear({size}, {size * 2}), {inner}, nn.Linear({size * 2}, {size}))")
    kind = w.rng.random()
    if kind < 0.35:
        w.helper("checkpoint", "from torch.utils.checkpoint import checkpoint\n")
        reentrant = w.value(x).requires_grad and w.chance(0.25)  # without, eager leaves out the layer's gradients
        found = w.let(f"{x} + checkpoint({layer}, {x}, use_reentrant={reentrant})")
    elif kind < 0.45:
        found = w.let(f"{x} + {layer}({x}).detach()")
    else:
        found = w.let(f"{x} + {layer}({x})")
    if found and w.chance(0.3):
        w.let(f"{layer}({found})")  # the layer's weights twice


def eagerly(w: Writer) -> None:
    """A part that torch.compile leaves to eager."""
    x = w.pick(lambda v: v.dim() > 0)
    if x is None:
        return
    if w.chance(0.6):
        w.helper("aside", "@torch.compiler.disable\ndef aside(t):\n    return torch.tanh(t) * t\n")
        w.let(f"aside({x})")
        return
    size = w.value(x).shape[-1]
    w.helper("Aside", ASIDE)
    w.let(f"{w.module(f'Aside({size})')}({x})")


ASIDE = """
class Aside(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.inner = nn.Linear(size, size)

    @torch.compiler.disable
    def forward(self, t):
        return torch.sigmoid(self.inner(t))
"""


def half(w: Writer) -> None:
    """A part in lower precision."""
    x = w.pick(lambda v: v.dim() > 1 and v.shape[-1] <= 8)
    if x is not None:
        size, name = w.value(x).shape[-1], w.name()
        layer = w.module(f"nn.Linear({size}, {size})")
        w.add(f"with torch.autocast('cpu', torch.bfloat16):\n    {name} = torch.tanh({layer}({x}))", name)


def recurrent(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() in (2, 3) and v.shape[-1] <= 8)
    if x is not None:
        size = w.value(x).shape[-1]
        w.let(f"{w.module(f'nn.GRU({size}, 3)')}({x})[0]")


def attention(w: Writer) -> None:
    x = w.pick(lambda v: v.dim() == 3)
    if x is not None:
        drop = w.choose(("", ", dropout_p=0.2 if self.training else 0.0", ", is_causal=True"))
        w.let(f"F.scaled_dot_product_attention({x}, {x}, {x}{drop})")


def table(w: Writer) -> None:
    """Rows of a table, looked up by what the values are."""
    x = w.pick(lambda v: v.dim() > 0 and v.shape[-1] <= 8)
    if x is not None:
        size = w.value(x).shape[-1]
        w.let(f"{x} + {w.module(f'nn.Embedding(5, {size})')}({x}.detach().argmax(-1) % 5)")


FAMILIES = (
    (14, block), (2, eagerly), (2, half), (0.6, recurrent), (2, attention), (2, table),
    (5, statements.unary), (3, statements.binary), (4, statements.linear), (2, statements.view), (1, statements.views),
    (1, statements.write), (1, statements.buffer), (1, statements.attribute), (2, statements.dropout),
    (2, statements.batch_norm), (1, statements.head), (0.5, statements.broken), (1, statements.straight_through),
)  # fmt: skip


def users_statement(w: Writer) -> None:
    """Write a line or a few of a family drawn by weight."""
    families = [family for _, family in FAMILIES]
    w.rng.choices(families, [weight for weight, _ in FAMILIES])[0](w)
