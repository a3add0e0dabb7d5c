"""The loop of a random program: calls, losses, backward passes, and what a user changes between them."""

from __future__ import annotations

from torch import Tensor

from tests.modules.writer import Writer


class Loop:
    """Writes the loop of a program: `paths` lead to the outputs, `raising` wants one that eager refuses."""

    def __init__(self, w: Writer, paths: list[tuple[str, Tensor]], given: list[str], raising: bool) -> None:
        self.w, self.paths, self.given, self.raising = w, paths, given, raising

    def inference(self) -> list[str]:
        w = self.w
        how = w.choose(("torch.no_grad()", "torch.inference_mode()"))
        lines = ["call.eval()"] if w.chance(0.7) else []
        for _ in range(w.rng.randint(1, 2)):
            lines += ["x = given()", f"with {how}:\n    out = call(*x)\n    see.outputs(out, x)"]
            lines += self.changes(0.3)
        return [*lines, "see.state()"]

    def training(self) -> list[str] | None:
        w = self.w
        useful = [path for path, value in self.paths if value.requires_grad and value.is_floating_point()]
        if not useful:
            return None
        kind = w.choose(("SGD", "SGD", "AdamW"))
        settings = "lr=0.05, momentum=0.9" if kind == "SGD" else "lr=0.01, eps=0.01"
        steps = list(w.model.parameters()) != []
        lines = [f"optimizer = torch.optim.{kind}(model.parameters(), {settings})"] if steps else []
        for number in range(w.choose((1, 1, 2))):
            if number or w.chance(0.1):
                lines += self.changes(0.7)
            lines += ["x = given()", "out = call(*x)", "see.outputs(out, x)"]
            if w.chance(0.12):
                lines.append(self.output_written())
            lines.append(self.loss(useful))
            if w.chance(0.08):
                lines += ["y = given()", "out = call(*y)", f"loss = loss + {self.terms(useful)}"]
            if w.chance(0.2) or self.raising:
                lines.append(self.between())
            lines += self.backward()
            if w.chance(0.15):
                how = w.choose(("torch.no_grad()", "torch.inference_mode()"))
                lines.append(f"with {how}:\n    x = given()\n    see.outputs(call(*x), x)")
            if steps and w.chance(0.8):
                lines += ["optimizer.step()", f"optimizer.zero_grad({w.choose(('', 'set_to_none=False'))})"]
        return [*lines, "see.state()"]

    def terms(self, useful: list[str]) -> str:
        w = self.w
        some = w.rng.sample(useful, w.rng.randint(1, len(useful)))
        ways = (
            "({}).sum()",
            "({}).square().mean()",
            "({} * 0.7).sum()",
            "({}).sin().mean()",
            "F.smooth_l1_loss({0}, torch.ones_like({0}))",
        )
        return " + ".join(w.choose(ways).format(path) for path in some)

    def loss(self, useful: list[str]) -> str:
        return f"loss = {self.terms(useful)}"

    def backward(self) -> list[str]:
        w, kind = self.w, self.w.rng.random()
        if kind < 0.2:
            twice = ["loss.backward(retain_graph=True)"] + (["see.gradients(x)"] if w.chance(0.5) else [])
            return [*twice, "loss.backward()", "see.gradients(x)"]
        if kind < 0.28:
            return [
                "wanted = list(model.parameters()) + [t for t in x if t.is_leaf and t.requires_grad]",
                "see.tensors(*torch.autograd.grad(loss, wanted, allow_unused=True))",
            ]
        if self.raising and w.chance(0.5):
            return ["loss.backward()", "loss.backward()", "see.gradients(x)"]
        return ["loss.backward()", "see.gradients(x)"]

    def state_names(self) -> list[str]:
        named = [*self.w.model.named_parameters(), *self.w.model.named_buffers()]
        return [name for name, value in named if value.is_floating_point()]

    def between(self) -> str:
        """Something that changes between forward and backward."""
        w, names = self.w, self.state_names()
        options = ["x[0].mul_(0.5)", "x[-1].add_(1)", "x[0].zero_()"]
        options += [f"model.get_parameter('{n}').mul_(0.7)" for n, _ in w.model.named_parameters()]
        options += [f"model.get_buffer('{n}').add_(0.3)" for n in names if n in dict(w.model.named_buffers())]
        if w.chance(0.1):
            return "call.eval()"
        return f"with torch.no_grad():\n    {w.choose(options)}"

    def output_written(self) -> str:
        w = self.w
        path = w.choose(self.paths)[0]
        line = w.choose(("{}.mul_(2)", "{}.add_(1)", "{}.zero_()", "{}[0] = 0.5")).format(path)
        return line if w.chance(0.5) else f"with torch.no_grad():\n    {line}"

    def changes(self, share: float) -> list[str]:
        """What a user changes between two calls."""
        w, lines = self.w, []
        if not w.chance(share):
            return []
        on = w.choose(("call", "call", "model"))
        for name, value in w.switches.items():
            if w.chance(0.7):
                lines.append(f"{on}.{name} = {(not value) if isinstance(value, bool) else value + 0.5}")
        names = self.state_names()
        if names and w.chance(0.4):
            name = w.choose(names)
            parent, _, last = name.rpartition(".")
            owner = f"{on}.{parent}" if parent else on
            shape = dict([*w.model.named_parameters(), *w.model.named_buffers()])[name].shape
            made = f"draw({', '.join(map(str, shape))}, seed=77)"
            if name in dict(w.model.named_parameters()):
                options = [f"{owner}.{last} = nn.Parameter({made})", f"{owner}.{last}.requires_grad_(False)"]
                options += [f"with torch.no_grad():\n    {owner}.{last}.copy_({made})", f"{owner}.{last}.data = {made}"]
            else:
                options = [f"{owner}.{last} = {made}", f"{owner}.{last}.copy_({made})"]
            lines.append(w.choose(options))
        if w.chance(0.2):
            lines.append(w.choose(("call.eval()", "call.train()", "model.eval()", "call.requires_grad_(False)")))
        return lines
