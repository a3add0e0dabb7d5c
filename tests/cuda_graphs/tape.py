"""A capturer where there is no device: what CUDA graphs do, in plain steps."""

from __future__ import annotations

import torch


class Tape:
    """A capturer on CPU: it runs what it has captured again, and puts what comes of it where that lay before."""

    def __init__(self):
        self.captures = self.releases = self.replays = 0
        self.failing = []
        self._blank = lambda value: value.clone()

    def capture(self, run, arguments):
        kept = list(arguments)
        arguments.clear()
        if self.failing and self.failing.pop(0):
            raise RuntimeError("CUDA out of memory.\nmore of it")
        self.captures += 1
        before, random = [_copy(value) for value in kept], torch.get_rng_state()
        made = []

        def make(value):
            made.append(value.clone())  # numbers that code can run on, to be written over
            return made[-1]

        self._blank = make
        results = run(list(kept))
        torch.set_rng_state(random)  # a CUDA graph runs nothing
        for value, known in zip(kept, before, strict=True):
            if known is not None:
                value.copy_(known)
        memory = list(results)
        for value in results:
            if isinstance(value, torch.Tensor) and not any(_share(value, given) for given in kept):
                value.zero_()

        def replay():
            self.replays += 1
            again = iter(made)
            self._blank = lambda value: next(again)
            for place, value in zip(memory, run(list(kept)), strict=True):
                if isinstance(place, torch.Tensor) and place is not value:
                    place.copy_(value)

        return replay, results

    def drawn(self):
        return torch.get_rng_state()

    def draw_from(self, place):
        torch.set_rng_state(place)

    def blank(self, value):
        return self._blank(value)

    def enter(self):
        pass

    def begin(self):
        self.capturing = True

    def end(self):
        self.capturing = False

    def release(self):
        self.releases += 1


def _copy(value):
    return value.clone() if isinstance(value, torch.Tensor) else None


def _share(value, other):
    if not isinstance(other, torch.Tensor):
        return False
    return value.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
