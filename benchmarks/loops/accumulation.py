"""Gradients that add up over several batches, or are set back in other places."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.loops.user import STEPS, Net, User, adamw, entropy, loop, plain


def accumulated(user: User, *, zero: str, set_to_none: bool = True, given: bool = True) -> Iterator[None]:
    model = Net()
    stepper = adamw(model)
    call = user.compile(model, stepper if given else None)
    for number in range(STEPS):
        if zero == "first":
            stepper.zero_grad(set_to_none=set_to_none)
        for part in range(3):
            x, y = user.data(3 * number + part)
            (entropy(call(x), x, y) / 3).backward()
        stepper.step()
        if zero == "last":
            stepper.zero_grad(set_to_none=set_to_none)
        yield


@loop
def accumulation(user: User) -> Iterator[None]:
    return accumulated(user, zero="last")


@loop
def accumulation_zero_first(user: User) -> Iterator[None]:
    return accumulated(user, zero="first")


@loop
def accumulation_of_zeros(user: User) -> Iterator[None]:
    return accumulated(user, zero="last", set_to_none=False)


@loop
def accumulation_optimizer_unknown(user: User) -> Iterator[None]:
    return accumulated(user, zero="last", given=False)


@loop
def zeros(user: User) -> Iterator[None]:
    return plain(user, entropy, set_to_none=False)


@loop
def zero_before_backward(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="backward")


@loop
def zero_last(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="last")


@loop
def never_zeroed(user: User) -> Iterator[None]:
    return plain(user, entropy, zero="never")


@loop
def two_losses_in_turn(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        stepper.zero_grad()
        for part in range(2):
            x, y = user.data(2 * number + part)
            loss = entropy(call(x), x, y) if part else call(x).square().mean()
            loss.backward()
        stepper.step()
        yield
