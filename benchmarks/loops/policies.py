"""Reinforcement learning: stored batches, buffers that grow, target networks."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, STEPS, Net, User, adamw, loop


@loop
def replay_buffer(user: User) -> Iterator[None]:
    """Deep Q learning: the buffer grows by a batch a step, and a target network is copied now and then."""
    model = Net(classes=8)
    target = copy.deepcopy(model).requires_grad_(False)
    stepper, call = user.with_adamw(model)
    states, rewards = list[torch.Tensor](), list[torch.Tensor]()
    for number in range(STEPS):
        x, y = user.data(number, BATCH // 4)
        states += x.unbind()
        rewards += (y.float() / 100).unbind()
        draws = torch.Generator().manual_seed(number)
        chosen = torch.randint(0, len(states), (BATCH,), generator=draws)
        x = torch.stack([states[i] for i in chosen])
        following = torch.stack([states[(i + 1) % len(states)] for i in chosen])
        reward = torch.stack([rewards[i] for i in chosen])
        with torch.no_grad():
            wanted = reward + 0.9 * target(following).max(-1).values
        loss = F.smooth_l1_loss(call(x).gather(1, (chosen % 8)[:, None]).squeeze(1), wanted)
        stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        stepper.step()
        if number % 4 == 3:
            target.load_state_dict(model.state_dict())
        user.note(loss)
        yield


@loop
def ppo(user: User) -> Iterator[None]:
    """A rollout without gradients, and several epochs over it with the ratio to its probabilities."""
    model = Net(2, classes=16)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, 2 * BATCH)
        with torch.no_grad():
            logits, value = call(x)
            actions = y % 16
            old = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
            returns = (y.float() / 50).roll(1)
            advantage = returns - value.mean(-1)
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(2):
            for rows in torch.arange(len(x)).chunk(2):
                logits, value = call(x[rows])
                logs = logits.log_softmax(-1)
                ratio = (logs.gather(1, actions[rows, None]).squeeze(1) - old[rows]).exp()
                gain = torch.min(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]).mean()
                entropy = -(logs.exp() * logs).sum(-1).mean()
                loss = -gain + 0.5 * F.mse_loss(value.mean(-1), returns[rows]) - 0.01 * entropy
                stepper.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
                stepper.step()
                user.note(loss)
        yield


@loop
def actor_and_critic(user: User) -> Iterator[None]:
    actor, critic = Net(classes=8), Net(classes=1)
    steppers = [adamw(actor), adamw(critic)]
    act, judge = user.compile([actor, critic], steppers)
    for x, y in user.batches():
        value = judge(x).squeeze(-1)
        gain = y.float() / 50 - value
        logs = act(x).log_softmax(-1).gather(1, (y % 8)[:, None]).squeeze(1)
        loss = -(logs * gain.detach()).mean() + gain.square().mean()
        for stepper in steppers:
            stepper.zero_grad()
        loss.backward()
        for stepper in steppers:
            stepper.step()
        user.note(loss)
        yield
