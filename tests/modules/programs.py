"""Whole programs: a random module, what it is called with, and a loop that trains or only calls it."""

from __future__ import annotations

import dataclasses
import random

import torch
from torch import Tensor

from tests.modules.loops import Loop
from tests.modules.running import Run, run
from tests.modules.statements import statement, view_of
from tests.modules.users_loops import Returned, UsersLoop, paths_of, with_loss
from tests.modules.users_statements import users_statement
from tests.modules.writer import Writer


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what eager makes of it.

    Attributes:
        name: the seed that it comes of.
        source: defines `Model`, `given` and `loop`.
        exact: its run in float64; `eager`: in float32.
    """

    name: str
    source: str
    exact: Run
    eager: Run


def program(seed: int, loops: str = "training") -> Program:
    """The program of a seed: eager runs it in both dtypes to the same end.

    Args:
        seed: always the same program.
        loops: "inference": the loop only calls the model, without gradients; "users": whole steps with much of what
            users' loops do; "training": a call or two, and what may change around them.
    """
    for attempt in range(1000):
        name = f"{seed}.{attempt}"
        rng = random.Random(name)
        raising = rng.random() < 0.03 and loops != "users"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            source = written_as_users_do(rng) if loops == "users" else written(rng, loops == "inference", raising)
            if source is None:
                continue
            found = judged_by_eager(name, source, raising)
        if found is not None:
            return found
    raise AssertionError(f"no program comes of seed {seed}")


def judged_by_eager(name: str, source: str, raising: bool = False) -> Program | None:
    """The program with its eager runs, or None if eager does not carry it out; `raising`: None if eager does."""
    exact, eager = run(source, torch.float64), run(source)
    if (exact.error is not None) != raising or (eager.error is not None) != raising:
        return None
    if raising and not (isinstance(eager.error, RuntimeError) and "backward" in str(eager.error)):
        return None
    if raising and len(eager.events) == 0:
        return None
    same = [event.facts for event in exact.events] == [event.facts for event in eager.events]
    if not same or not all(torch.isfinite(v).all() for e in eager.events for v in e.values.values()):
        return None
    return Program(name, source, exact, eager)


def written(rng: random.Random, inference: bool, raising: bool) -> str | None:
    """The source of a random program; None if it makes nothing to be returned."""
    w = Writer(rng)
    given = _inputs(w)
    for _ in range(rng.randint(3, 12)):
        statement(w)
    returned, paths = _returned(w)
    if not paths:
        return None
    loop = Loop(w, paths, [name for name, _ in given], raising)
    body = loop.inference() if inference else loop.training()
    if body is None:
        return None
    sources = [f"{name} = {source}" for name, source in given]
    return _joined(w, returned, [name for name, _ in given], sources, ["call = compiled(model)", *body])


def written_as_users_do(rng: random.Random) -> str | None:
    """The source of a model with a loop of whole steps; None if it makes nothing that can be trained."""
    w = Writer(rng)
    rows = w.choose((4, 6, 8))
    shape = (rows, *w.choose(((4,), (6,), (3, 4), (4, 4))))
    more = w.choose(("",) * 5 + (".requires_grad_()",))
    source = f"draw({'rows' if w.chance(0.7) else rows}, {', '.join(map(str, shape[1:]))}, seed=100 + step){more}"
    w.env |= {"rows": rows, "step": 0}
    exec(f"x0 = {source}", w.env)
    w.values.append("x0")
    for _ in range(rng.randint(2, 7)):
        users_statement(w)
    fresh = [name for name in w.values if name.startswith("v")]
    if not fresh:
        return None
    if w.chance(0.6):
        names = [w.choose(fresh[-3:]) for _ in range(w.rng.randint(1, 3))]
        returned, loss = with_loss(w, names)
        names = list(dict.fromkeys(names))
        paths = list(zip(paths_of(returned, len(names)), map(w.value, names), strict=True))
    else:
        (returned, paths), loss = _returned(w), ""
    body = UsersLoop(w, Returned(paths, loss, "rows" in source)).training()
    if body is None:
        return None
    return _joined(w, returned, ["x0"], [f"x0 = {source}"], body, f"step=0, rows={rows}")


def _joined(w: Writer, returned: str, names: list[str], made: list[str], body: list[str], given: str = "") -> str:
    """The source: the model, what it is called with, and the loop."""
    lines = [*w.helpers.values(), "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in w.init]
    lines += ["", f"    def forward(self, {', '.join(names)}):"]
    lines += [f"        {line}" for block in w.forward for line in block.split("\n")]
    lines += [f"        return {returned}", "", f"def given({given}):"]
    lines += [f"    {line}" for line in made]
    lines += [f"    return [{', '.join(names)}]", "", "def loop(model, compiled, given, see):"]
    lines += [f"    {line}" for block in body for line in block.split("\n")]
    return "\n".join(lines) + "\n"


def _inputs(w: Writer) -> list[tuple[str, str]]:
    found = []
    for i in range(w.rng.randint(1, 2)):
        shape = w.choose(((12, 4), (10, 6), (6, 4), (4, 4), (8, 3, 4), (2, 3, 4), (6,)))
        source = f"draw({', '.join(map(str, shape))}, seed={100 + i})"
        kind = w.rng.random()
        if kind < 0.25:
            source += ".requires_grad_()"
        elif kind < 0.35:
            source += w.choose((".transpose(0, -1)", "[::2]", ".expand(2, *[-1] * " + str(len(shape)) + ")"))
        found.append((f"x{i}", source))
        exec(f"x{i} = {source}", w.env)
        w.values.append(f"x{i}")
    return found


def _returned(w: Writer) -> tuple[str, list[tuple[str, Tensor]]]:
    """An expression of what forward returns, and the paths to its tensors."""
    names: list[str] = []
    fresh = [name for name in w.values if name.startswith("v")] or w.values
    for _ in range(w.rng.choice((1, 1, 2, 2, 3, 4))):
        name = w.choose(fresh[-4:] if w.chance(0.7) else w.values)
        names.append(name)
        kind = w.rng.random()
        if kind < 0.2:
            names.append(f"{name}.detach()")
        elif kind < 0.3:
            names.append(name)
        elif kind < 0.45:
            names.append(view_of(w, name))
        elif kind < 0.5:
            state = [f"self.{n}" for n, _ in (*w.model.named_parameters(), *w.model.named_buffers()) if "." not in n]
            names += [w.choose(state)] if state else []
    w.rng.shuffle(names)
    names = [name for name in names if _evaluates(w, name)]
    kind = w.rng.random()
    if len(names) == 1 and kind < 0.7:
        return names[0], [("out", w.env["_result"])] if _evaluates(w, names[0]) else []
    if kind < 0.6:
        paths, text = [f"out[{i}]" for i in range(len(names))], f"({', '.join(names)},)"
    elif kind < 0.8:
        paths = [f"out['{chr(97 + i)}']" for i in range(len(names))]
        text = "{" + ", ".join(f"'{chr(97 + i)}': {name}" for i, name in enumerate(names)) + "}"
    else:
        extra = w.choose(("None", "3", "0.5"))
        text = f"({names[0]}, {{'rest': [{', '.join(names[1:])}]}}, {extra})" if names else ""
        paths = ["out[0]", *(f"out[1]['rest'][{i}]" for i in range(len(names) - 1))][: len(names)]
    found = []
    for name, path in zip(names, paths, strict=True):
        _evaluates(w, name)
        found.append((path, w.env["_result"]))
    return text, found


def _evaluates(w: Writer, expression: str) -> bool:
    try:
        w.env["_result"] = eval(expression, w.env)
    except Exception:
        return False
    return isinstance(w.env["_result"], Tensor)
