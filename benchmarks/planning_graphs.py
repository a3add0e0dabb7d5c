"""Synthetic training steps in plain numbers, shaped like well-known networks, for the planner's benchmark and tests."""

from __future__ import annotations

import dataclasses

from memopt.solve.problem import StepProblem

BANDWIDTH = 2.5e12  # bytes a second
RATE = 4e14  # floating-point operations a second
LAUNCH = 3e-6  # seconds


@dataclasses.dataclass
class Tape:
    """Records forward operations and, for each, what its gradient reads; `finish` writes the backward pass."""

    sizes: list[int] = dataclasses.field(default_factory=list)
    reads: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    writes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    costs: list[float] = dataclasses.field(default_factory=list)
    resident: set[int] = dataclasses.field(default_factory=set)
    random: set[int] = dataclasses.field(default_factory=set)
    records: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], float]] = dataclasses.field(
        default_factory=list
    )

    def storage(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def weight(self, size: int) -> int:
        storage = self.storage(size)
        self.resident.add(storage)
        return storage

    def run(self, reads: tuple[int, ...], sizes: tuple[int, ...], flops: float = 0.0) -> tuple[int, ...]:
        out = tuple(self.storage(size) for size in sizes)
        moved = sum(self.sizes[storage] for storage in (*reads, *out))
        self.reads.append(reads)
        self.writes.append(out)
        self.costs.append(max(moved / BANDWIDTH, flops / RATE) + LAUNCH)
        return out

    def apply(
        self,
        inputs: tuple[int, ...],
        size: int,
        *,
        weights: tuple[int, ...] = (),
        needs: str = "i",
        extra: tuple[int, ...] = (),
        flops: float = 0.0,
        recomputable: bool = True,
    ) -> int:
        """Record one forward operation. `needs`: what its gradient reads: i(nputs), o(utput), e(xtra outputs)."""
        operation = len(self.reads)
        out = self.run((*inputs, *weights), (size, *extra), flops)
        if not recomputable:
            self.random.add(operation)
        wanted = (
            (inputs if "i" in needs else ()) + ((out[0],) if "o" in needs else ()) + (out[1:] if "e" in needs else ())
        )
        self.records.append((out[0], inputs, weights, wanted, flops))
        return out[0]

    def finish(self, loss: int) -> StepProblem:
        forward = len(self.reads)
        tangent = self.storage(self.sizes[loss])
        gradient = {loss: tangent}
        pinned = {loss}
        for out, inputs, weights, wanted, flops in reversed(self.records):
            if out not in gradient:
                continue
            arrived = gradient.pop(out)
            targets = [source for source in inputs if source not in self.resident]
            for weight in weights:
                (made,) = self.run((arrived, *wanted), (self.sizes[weight],), flops)
                pinned.add(made)
            for source in targets:
                share = self.run(
                    (arrived, *(w for w in wanted if w != arrived), *weights), (self.sizes[source],), flops
                )[0]
                if source in gradient:
                    share = self.run((gradient[source], share), (self.sizes[source],))[0]
                gradient[source] = share
        operations = len(self.reads)
        return StepProblem(
            sizes=tuple(self.sizes),
            reads=tuple(tuple(dict.fromkeys(reads)) for reads in self.reads),
            writes=tuple(self.writes),
            costs=tuple(self.costs),
            workspace=(0,) * operations,
            forward=forward,
            recomputable=tuple(operation < forward and operation not in self.random for operation in range(operations)),
            pinned=frozenset(pinned),
            resident=frozenset(self.resident),
            arriving=frozenset({tangent}),
        )


def chain(length: int, size: int = 1, cost: float = 1.0) -> StepProblem:
    """A chain of equal operations whose gradients each read the operation's input and output."""
    forward = [((i,), (i + 1,)) for i in range(length)]
    first = length + 1
    backward = []
    for i in range(length):
        backward.append(((length - i, length - i - 1, first + i), (first + i + 1,)))
    operations = forward + backward
    return StepProblem(
        sizes=(size,) * (first + length + 1),
        reads=tuple(reads for reads, _ in operations),
        writes=tuple(writes for _, writes in operations),
        costs=(cost,) * (2 * length),
        workspace=(0,) * (2 * length),
        forward=length,
        recomputable=(True,) * length + (False,) * length,
        resident=frozenset({0}),
        arriving=frozenset({first}),
    )


def transformer(
    layers: int, tokens: int = 16 * 1024, width: int = 1024, heads: int = 16, vocabulary: int = 50304
) -> StepProblem:
    """A GPT-2-like step in 2-byte numbers with dropout: norms, attention, MLP, LM head."""
    tape, unit = Tape(), tokens * width * 2
    ids = tape.weight(tokens * 8)
    x = tape.apply((ids,), unit, weights=(tape.weight(vocabulary * width * 2),), needs="i")

    def linear(source: int, inside: int, outside: int) -> int:
        weight = tape.weight(inside * outside * 2)
        flat = tape.apply((source,), tokens * outside * 2, weights=(weight,), flops=2.0 * tokens * inside * outside)
        return tape.apply((flat,), tokens * outside * 2, weights=(tape.weight(outside * 2),), needs="")

    def norm(source: int) -> int:
        weight = tape.weight(width * 2)
        wide = tape.apply((source,), 2 * unit, needs="")
        centred = tape.apply((wide,), 2 * unit, extra=(tokens * 4,), needs="ie")
        return tape.apply((centred,), unit, weights=(weight,), needs="i")

    def dropout(source: int) -> int:
        seed = tape.apply((ids,), 8, needs="", recomputable=False)
        noise = tape.apply((seed,), unit * 2, needs="")
        mask = tape.apply((noise,), unit // 2, needs="")
        return tape.apply((source, mask), unit, needs="i")

    for _ in range(layers):
        qkv = linear(norm(x), width, 3 * width)
        q, k, v = (tape.apply((qkv,), unit, needs="") for _ in range(3))
        attention = tape.apply(
            (q, k, v),
            unit,
            extra=(tokens * heads * 4, 16),
            needs="ioe",
            flops=4.0 * tokens * 1024 * width,
            recomputable=True,
        )
        x = tape.apply((x, dropout(linear(attention, width, width))), unit, needs="")
        hidden = linear(norm(x), width, 4 * width)
        cubed = tape.apply((hidden,), 4 * unit, needs="i")
        tanh = tape.apply((cubed,), 4 * unit, needs="o")
        half = tape.apply((hidden,), 4 * unit, needs="")
        active = tape.apply((half, tanh), 4 * unit, needs="i")
        x = tape.apply((x, dropout(linear(active, 4 * width, width))), unit, needs="")
    logits = linear(norm(x), width, vocabulary)
    wide = tape.apply((logits,), tokens * vocabulary * 4, needs="")
    probability = tape.apply((wide,), tokens * vocabulary * 4, needs="o")
    loss = tape.apply((probability,), 4, needs="")
    return tape.finish(loss)


def unet(depth: int = 5, width: int = 64, resolution: int = 512, batch: int = 8) -> StepProblem:
    """A U-Net-like step in 2-byte numbers: convolutions, max-pool down, up-convolution and concatenation up."""
    tape = Tape()
    image = tape.weight(batch * 3 * resolution * resolution * 2)

    def bytes_at(level: int, channels: int) -> int:
        return batch * channels * (resolution >> level) ** 2 * 2

    def block(source: int, level: int, inside: int, outside: int) -> int:
        for channels in (inside, outside):
            size = bytes_at(level, outside)
            flops = size / 2 * channels * 9 * 2
            source = tape.apply((source,), size, weights=(tape.weight(channels * outside * 18),), flops=flops)
            source = tape.apply((source,), size, weights=(tape.weight(outside * 4),), extra=(outside * 4,), needs="ie")
            source = tape.apply((source,), size, needs="o")
        return source

    skips, x, channels = [], image, 3
    for level in range(depth):
        x = block(x, level, channels, width << level)
        channels = width << level
        if level < depth - 1:
            skips.append(x)
            size = bytes_at(level + 1, channels)
            x = tape.apply((x,), size, extra=(size // 2,), needs="e")
    for level in reversed(range(depth - 1)):
        size = bytes_at(level, channels // 2)
        x = tape.apply((x,), size, weights=(tape.weight(channels * channels * 4),), flops=size / 2 * channels * 2)
        x = tape.apply((skips.pop(), x), 2 * size, needs="")
        x = block(x, level, channels, channels // 2)
        channels //= 2
    logits = tape.apply((x,), bytes_at(0, 2), weights=(tape.weight(channels * 4),))
    return tape.finish(tape.apply((logits,), 4, needs="i"))


def densenet(blocks: tuple[int, ...] = (6, 12, 36, 24), growth: int = 48, batch: int = 96) -> StepProblem:
    """A DenseNet-161-like step in 2-byte numbers: each layer concatenates everything before it in its block."""
    tape = Tape()
    image = tape.weight(batch * 3 * 224 * 224 * 2)
    resolution, channels = 56, 2 * growth

    def size(count: int) -> int:
        return batch * count * resolution * resolution * 2

    def norm_act(source: int, count: int) -> int:
        weight = tape.weight(count * 4)
        source = tape.apply((source,), size(count), weights=(weight,), extra=(count * 4,), needs="ie")
        return tape.apply((source,), size(count), needs="o")

    def conv(source: int, inside: int, outside: int, kernel: int) -> int:
        flops = size(outside) / 2 * inside * kernel * kernel * 2
        weight = tape.weight(inside * outside * kernel * kernel * 2)
        return tape.apply((source,), size(outside), weights=(weight,), flops=flops)

    x = norm_act(conv(image, 3, channels, 14), channels)
    for index, layers in enumerate(blocks):
        parts, counts = [x], [channels]
        for _ in range(layers):
            whole = tape.apply(tuple(parts), size(sum(counts)), needs="") if len(parts) > 1 else x
            middle = conv(norm_act(whole, sum(counts)), sum(counts), 4 * growth, 1)
            parts.append(conv(norm_act(middle, 4 * growth), 4 * growth, growth, 3))
            counts.append(growth)
        x = tape.apply(tuple(parts), size(sum(counts)), needs="")
        channels = sum(counts)
        if index < len(blocks) - 1:
            x = conv(norm_act(x, channels), channels, channels // 2, 1)
            channels //= 2
            resolution //= 2
            x = tape.apply((x,), size(channels), needs="")
    pooled = tape.apply((norm_act(x, channels),), batch * channels * 2, needs="")
    return tape.finish(tape.apply((pooled,), 4, needs="i"))
