"""The loop of a random program as users write them: whole steps, each with some of what real loops do, together."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from tests.modules.writer import Writer

_STEPS = 3
_OPTIMIZERS = (
    "SGD({}, lr=0.05)", "SGD({}, lr=0.05, momentum=0.9)", "AdamW({}, lr=0.01, eps=0.01)", "Adam({}, lr=0.01, eps=0.01)",
    "AdamW({}, lr=0.01, eps=0.01, foreach=True)", "RMSprop({}, lr=0.01, eps=0.01)",
)  # fmt: skip
_TERMS = (
    "({}).sum()", "({}).square().mean()", "({} * 0.7).sum()", "({}).sin().mean()", "({}).mean()",
    "F.smooth_l1_loss({0}, torch.ones_like({0}))", "F.mse_loss({0}, {0}.detach().roll(1, 0))",
)  # fmt: skip
_IF_TRAINED = "\n    if p.requires_grad:\n        "


@dataclasses.dataclass(frozen=True)
class Returned:
    """What the model returns.

    Attributes:
        paths: lead from `out` to its tensors.
        loss: leads from a call to the loss that it holds, as ".loss"; empty where it holds none.
        rows: whether `given` makes as many rows as it is asked for.
    """

    paths: list[tuple[str, Tensor]]
    loss: str
    rows: bool


class UsersLoop:
    """Writes the loop of a program."""

    def __init__(self, w: Writer, returned: Returned) -> None:
        self.w, self.returned = w, returned
        self.useful = [path for path, v in returned.paths if v.requires_grad and v.is_floating_point()]
        self.in_backward = False
        # Eager goes backward through these one call at a time, which hooks of parameters see.
        self.reentrant = any("use_reentrant=True" in line for line in w.forward)

    def training(self) -> list[str] | None:
        w = self.w
        if not (self.useful or self.returned.loss) or not list(w.model.parameters()):
            return None
        lines = [*self.frozen(), *self.optimizers(), *self.models(), *self.hooks()]
        self.autocast = w.chance(0.12)
        self.scaler = not self.in_backward and w.chance(0.07)
        self.clips = not self.in_backward and w.chance(0.15)
        self.reads_gradients = w.chance(0.6)
        self.zero = w.choose(("first", "last", "last", "before backward"))
        self.zeros = w.choose(("", "", "set_to_none=False"))
        if self.scaler:
            lines.append("scaler = torch.amp.GradScaler('cpu', init_scale=8.0)")
        self.scheduled = not self.in_backward and w.chance(0.1)
        if self.scheduled:
            lines.append("scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)")
        body = self.step()
        lines += [f"for step in range({_STEPS}):", *(f"    {line}" for block in body for line in block.split("\n"))]
        return [*lines, "see.state()"]

    # -- before the steps ---------------------------------------------------------------------------------------------

    def frozen(self) -> list[str]:
        w = self.w
        if not w.chance(0.15):
            return []
        which = w.choose((":1", "1:", "-1:", "::2"))
        return [f"for p in list(model.parameters())[{which}]:\n    p.requires_grad_(False)"]

    def optimizers(self) -> list[str]:
        w = self.w
        made = "torch.optim." + w.choose(_OPTIMIZERS)
        self.in_backward = w.chance(0.2) and not self.reentrant
        if not self.in_backward:
            return [f"optimizer = {made.format('[p for p in model.parameters()]')}"]
        # One for each parameter, which steps as the gradient is there, and drops it.
        drop = w.choose(("own[p].zero_grad()", "p.grad = None", "own[p].zero_grad(set_to_none=False)"))
        return [
            f"own = {{p: {made.format('[p]')} for p in model.parameters()}}",
            f"def at_once(p):\n    own[p].step()\n    {drop}",
            f"for p in own:{_IF_TRAINED}p.register_post_accumulate_grad_hook(at_once)",
        ]

    def models(self) -> list[str]:
        """The stand-in, and what runs beside it."""
        w = self.w
        given = ""
        if w.chance(0.5):
            given = ", optimizer=list(own.values())" if self.in_backward else ", optimizer=optimizer"
        self.beside = w.choose(("",) * 6 + ("teacher", "together", "average", "head"))
        if self.beside == "teacher":
            target = "compiled(copy.deepcopy(model).eval())" if w.chance(0.5) else "copy.deepcopy(model).eval()"
            return [f"teacher = {target}", f"call = compiled(model{given})"]
        if self.beside == "together":
            return [
                "call, teacher = compiled([model, copy.deepcopy(model).eval().requires_grad_(False)]"
                + (given if not given or not self.in_backward else "")
                + ")"
            ]
        lines = [f"call = compiled(model{given})"]
        if self.beside == "average":
            lines.append("average = copy.deepcopy(model)")
        if self.beside == "head" and self.useful:
            self.headed = w.choose(self.useful)
            value = dict(self.returned.paths)[self.headed]
            size = value.shape[-1] if value.dim() else 0
            if not size:
                self.beside = ""
                return lines
            lines += [
                f"last = nn.Linear({size}, 3)",
                "with torch.no_grad():\n    for p in last.parameters():\n        p.copy_(draw(*p.shape, seed=5))",
                "last.to(draw(1).dtype)",
                "head = compiled(last)",
                "head_optimizer = torch.optim.SGD(last.parameters(), lr=0.05)",
            ]
        return lines

    def hooks(self) -> list[str]:
        w, lines = self.w, []
        if w.chance(0.12) and not self.reentrant:
            scaled = w.choose(("lambda g: g * 0.5", "lambda g: seen.append(g.norm())", "lambda g: g.clamp(-0.5, 0.5)"))
            which = w.choose(("", "[:1]", "[-1:]"))
            lines += [
                "seen = []",
                f"for p in list(model.parameters()){which}:{_IF_TRAINED}p.register_hook({scaled})",
            ]
        if not self.in_backward and not self.reentrant and w.chance(0.08):
            how = w.choose(("norms.append(p.grad.norm())", "p.grad.mul_(0.5)", "p.grad.clamp_(-0.5, 0.5)"))
            lines += [
                "norms = []",
                f"def after(p):\n    {how}",
                f"for p in model.parameters():{_IF_TRAINED}p.register_post_accumulate_grad_hook(after)",
            ]
        if w.chance(0.08):
            on = w.choose(("model", "call", "list(model.modules())[-1]"))
            lines += [
                "heard = []",
                f"{on}.register_forward_hook(lambda m, given, out: heard.append(type(out).__name__))",
            ]
        return lines

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> list[str]:
        w, lines = self.w, []
        self.kept_graph = w.chance(0.12)
        calls = w.choose((1, 1, 1, 2, 3))
        lines += self.between_steps()
        if self.zero == "first":
            lines += self.zeroed()
        asked = w.chance(0.1)
        if calls > 1 and w.chance(0.6):
            block = self.micro_step("2 * step + micro", asked, calls)
            lines += [f"for micro in range({calls}):", *(f"    {line}" for b in block for line in b.split("\n"))]
        elif calls > 1 and not asked:  # several calls, one backward
            lines += self.call("step", "loss")
            for number in range(1, calls):
                lines += [*self.call(f"step + {7 * number}", "more"), "loss = loss + more"]
            lines += self.backward("loss", asked)
        else:
            lines += self.micro_step("step", asked, 1)
        lines += self.end()
        return lines

    def micro_step(self, seed: str, asked: bool, calls: int) -> list[str]:
        return [*self.call(seed, "loss"), *self.backward("loss" if calls == 1 else f"(loss / {calls})", asked)]

    def call(self, seed: str, loss: str) -> list[str]:
        w = self.w
        rows = f", {w.choose(('8', '(8, 6, 10)[step]', '8 - 2 * (step == 2)'))}" if self.returned.rows else ""
        lines, body = [f"x = given({seed}{rows if w.chance(0.5) else ''})"], []
        if self.returned.loss and w.chance(0.75):
            if w.chance(0.5):
                body.append(f"{loss} = call(*x){self.returned.loss}")
            else:
                body += ["out = call(*x)", f"{loss} = out{self.returned.loss}"]
            if w.chance(0.2):
                body.append(f"{loss} = {loss} * 0.5")
        elif self.useful:
            body.append("out = call(*x)")
            if w.chance(0.3):
                body.append("see.outputs(out, x)")
            body += self.output_hooks()
            if self.beside == "head" and w.chance(0.8):
                body.append(f"{loss} = head({self.headed}).square().mean()")
            elif w.chance(0.15) and len(self.useful) > 1:
                one, two = w.rng.sample(self.useful, 2)
                body.append(f"if step % 2:\n    {loss} = {self.term(one)}\nelse:\n    {loss} = {self.term(two)}")
            else:
                body.append(f"{loss} = {self.terms()}")
        else:
            body.append(f"{loss} = call(*x){self.returned.loss}")
        if self.beside in ("teacher", "together") and self.useful and "out = call(*x)" in body:
            path = w.choose(self.useful)
            body += [
                "with torch.no_grad():\n    target = teacher(*x)",
                f"{loss} = {loss} + F.mse_loss({path}, {path.replace('out', 'target', 1)})",
            ]
        if self.autocast:
            body = ["with torch.autocast('cpu', torch.bfloat16):", *(f"    {t}" for b in body for t in b.split("\n"))]
        lines += ["\n".join(body)]
        if w.chance(0.08):
            lines.append("del out" if any("out = " in line for line in body) else "pass")
        return lines

    def output_hooks(self) -> list[str]:
        w, path = self.w, self.w.choose(self.useful)
        if not w.chance(0.12):
            return []
        return [
            f"{path}.{w.choose(('retain_grad()', 'register_hook(lambda g: g * 0.5)', 'register_hook(lambda g: None)'))}"
        ]

    def term(self, path: str) -> str:
        return self.w.choose(_TERMS).format(path)

    def terms(self) -> str:
        some = self.w.rng.sample(self.useful, self.w.rng.randint(1, len(self.useful)))
        return " + ".join(map(self.term, some))

    def backward(self, loss: str, asked: bool) -> list[str]:
        w = self.w
        lines = self.zeroed() if self.zero == "before backward" else []
        if w.chance(0.2):
            lines.append("see.tensors(loss)")
        if asked:
            lines += [
                "wanted = [p for p in model.parameters() if p.requires_grad]",
                f"found = torch.autograd.grad({loss}, wanted, allow_unused=True)",
                "for p, g in zip(wanted, found):\n    p.grad = g",
            ]
        elif w.chance(0.06):
            lines += [
                "leaves = [t for t in x if t.requires_grad and t.is_leaf]",
                f"see.tensors(*torch.autograd.grad({loss}, leaves, retain_graph=True, allow_unused=True))",
                f"{loss}.backward()",
            ]
        elif self.kept_graph:
            lines += [f"{loss}.backward(retain_graph=True)", f"{loss}.backward()"]
        elif self.scaler:
            lines.append(f"scaler.scale({loss}).backward()")
        else:
            lines.append(f"{loss}.backward()")
        if self.reads_gradients:
            lines.append("see.gradients(x)")
        return lines

    def end(self) -> list[str]:
        w, lines = self.w, []
        if self.scaler and self.clips:
            lines.append("scaler.unscale_(optimizer)")
        if self.clips:
            lines.append("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)")
        if self.beside == "head":
            lines += ["head_optimizer.step()", "head_optimizer.zero_grad()"]
        if not self.in_backward:
            steps = ["scaler.step(optimizer)", "scaler.update()"] if self.scaler else ["optimizer.step()"]
            if w.chance(0.08):  # a step that is left out
                lines += ["if step != 1:", *(f"    {line}" for line in steps)]
            else:
                lines += steps
        if self.scheduled:
            lines.append("scheduler.step()")
        if self.zero == "last":
            lines += self.zeroed()
        if self.beside == "average":
            lines += [
                "with torch.no_grad():",
                "    for mine, his in zip(average.parameters(), model.parameters()):",
                "        mine.lerp_(his, 0.1)",
            ]
        if w.chance(0.15):
            lines.append("see.tensors(loss)")
        if w.chance(0.12):
            lines += self.evaluation()
        return lines

    def zeroed(self) -> list[str]:
        if self.in_backward:
            return []
        return [f"optimizer.zero_grad({self.zeros})"]

    def evaluation(self) -> list[str]:
        w = self.w
        how = w.choose(("torch.no_grad()", "torch.inference_mode()"))
        rows = ", 6" if self.returned.rows and w.chance(0.5) else ""
        once = w.choose(("if True:", "if step % 2:"))
        mode = w.choose((("call.eval()", "call.train()"), ("model.eval()", "model.train()"), ("pass", "pass")))
        lines = [mode[0], f"with {how}:\n    x = given(50{rows})\n    see.outputs(call(*x), x)", mode[1]]
        return [once, *(f"    {line}" for block in lines for line in block.split("\n"))]

    def between_steps(self) -> list[str]:
        """What changes in the middle of a training."""
        w = self.w
        if not w.chance(0.3):
            return []
        at = w.choose(("if step == 2:", "if step == 1:", "if step:"))
        options = [
            ["kept = copy.deepcopy(model.state_dict())", "model.load_state_dict(kept)"],
            ["call.load_state_dict({k: v * 0.5 for k, v in call.state_dict().items()})"],
            ["model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=False)"],
            ["for p in model.parameters():\n    p.requires_grad_(True)"],
            ["list(model.parameters())[0].requires_grad_(False)"],
            ["with torch.no_grad():\n    for p in model.parameters():\n        p.mul_(0.9)"],
            ["twin = copy.deepcopy(call)", "with torch.no_grad():\n    see.outputs(twin(*given(60)), ())"],
            ["model.eval()"],
            ["call.train(step % 2 == 0)"],
            ["for p in model.parameters():\n    p.data = p.data.clone()"],
        ]
        if not self.in_backward:
            options += [
                ["optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))"],
                ["for group in optimizer.param_groups:\n    group['lr'] = 0.02"],
            ]
        chosen = w.choose(options)
        return [at, *(f"    {line}" for block in chosen for line in block.split("\n"))]


def with_loss(w: Writer, names: list[str]) -> tuple[str, str]:
    """An expression of several values with a loss of one of them first, and what leads from the result to the loss."""
    loss = w.choose(_TERMS).format(w.choose(names))
    kind = w.choose(("record", "dict", "tuple", "named", "plain dict"))
    rest = list(dict.fromkeys(names))[:3]
    if kind == "record":
        w.helper("Record", RECORD)
        more = f", more=[{', '.join(rest[1:])}]" if rest[1:] else ""
        return f"Record({loss}, {rest[0]}{more})", w.choose((".loss", '["loss"]', "[0]"))
    if kind == "named":
        w.helper("Named", NAMED)
        return f"Named({loss}, {rest[0]}, [{', '.join(rest[1:])}])", w.choose((".loss", "[0]"))
    if kind == "tuple":
        return f"({loss}, {', '.join(rest)})", "[0]"
    text = ", ".join(f"'{chr(97 + i)}': {name}" for i, name in enumerate(rest))
    return f"{{'loss': {loss}, {text}}}", '["loss"]'


def paths_of(expression: str, count: int) -> list[str]:
    """The paths to the values beside the loss in what `with_loss` has written."""
    rest = range(count)
    if expression.startswith("Record("):
        return ["out.first", *(f"out.more[{i}]" for i in range(count - 1))]
    if expression.startswith("Named("):
        return ["out.first", *(f"out.more[{i}]" for i in range(count - 1))]
    if expression.startswith("("):
        return [f"out[{i + 1}]" for i in rest]
    return [f"out['{chr(97 + i)}']" for i in rest]


RECORD = """
@dataclasses.dataclass
class Record:
    loss: torch.Tensor
    first: torch.Tensor = None
    more: tuple = ()

    def __getitem__(self, key):
        return (self.loss, self.first, *self.more)[key] if isinstance(key, int) else getattr(self, key)
"""
NAMED = """
Named = collections.namedtuple("Named", ["loss", "first", "more"])
"""
