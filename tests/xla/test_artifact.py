from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.capture.export import from_module  # noqa: E402
from memopt.pass_manager import PassManager  # noqa: E402
from memopt.passes import INFERENCE  # noqa: E402
from memopt.program import OutputKind, Program  # noqa: E402
from memopt.xla.artifact import Artifact, to_artifact  # noqa: E402
from memopt.xla.lower import precision  # noqa: E402
from memopt.xla.table import LowerError  # noqa: E402
from tests.end_to_end import FAMILIES, build  # noqa: E402
from tests.xla.test_lower import Function, to_jax, to_torch  # noqa: E402


def program_at(model: nn.Module, inputs: dict[str, Any], batch: int) -> Program:
    program = from_module(model, (), resized(inputs, batch))
    return PassManager(INFERENCE, False).run(program)[0]


def resized(inputs: dict[str, Any], batch: int) -> dict[str, Any]:
    return {name: torch.cat([value] * 2)[:batch] for name, value in inputs.items()}


def call(artifact: Artifact, *given: torch.Tensor) -> list[torch.Tensor]:
    rest = iter(given)
    values = [artifact.state[i.name] if i.name in artifact.state else next(rest) for i in artifact.inputs]
    with precision(artifact.x64):
        return [to_torch(value) for value in artifact.call(*(to_jax(value.contiguous()) for value in values))]


QUICK = ("resnet18", "unet", "llama_tiny", "hf_bert")
SLOW = (*(set(FAMILIES) - set(QUICK)), "hf_vit")


@pytest.mark.quick("llama_tiny")
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(SLOW))])
def test_one_artifact_for_every_batch_size(name: str) -> None:
    model, inputs = build(name, labels=False)
    model.eval()
    artifact = to_artifact(program_at(model, inputs, 3), [program_at(model, inputs, batch) for batch in (5, 2)])
    assert set(artifact.exported.platforms) == {"cpu", "cuda"}
    for batch in (1, 7):
        given = resized(inputs, batch)
        expected = torch.utils._pytree.tree_leaves(model(**given))
        for found, value in zip(call(artifact, *given.values()), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-5)


def test_weights_are_arguments_and_not_in_the_module() -> None:
    model = nn.Linear(256, 256)
    artifact = to_artifact(from_module(model, (torch.randn(2, 256),)))
    assert [entry.target for entry in artifact.inputs] == ["weight", "bias", None] and artifact.kept == (0, 1, 2)
    assert len(artifact.exported.mlir_module_serialized) < 20_000


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return x * self.count, 3


def test_mutated_buffers_are_results_and_numbers_are_not() -> None:
    artifact = to_artifact(from_module(Counting(), (torch.ones(2),)))
    assert [output.kind for output in artifact.outputs] == [OutputKind.MUTATION, OutputKind.USER]
    assert artifact.plain == {2: 3} and artifact.x64
    count, result = call(artifact, torch.ones(2))
    assert count.dtype is torch.int64 and int(count) == 1 and result.tolist() == [1.0, 1.0]


def test_a_size_that_cannot_vary_is_named() -> None:
    def program(batch: int) -> Program:
        def function(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(-1) @ x.new_ones(len(x) * len(x) * 2)

        return from_module(Function(function), (torch.ones(batch, 2 * batch),))

    with pytest.raises(LowerError, match=r"aten\..* cannot vary in size: 8, 50, 18 at sizes 2, 5, 3"):
        to_artifact(program(2), [program(5), program(3)])


def test_nothing_varies_between_equal_captures() -> None:
    program = from_module(Function(torch.relu), (torch.ones(2),))
    with pytest.raises(LowerError, match="no input has another size"):
        to_artifact(program, [program, program])
    with pytest.raises(ValueError, match="three captures or more"):
        to_artifact(program, [program])
