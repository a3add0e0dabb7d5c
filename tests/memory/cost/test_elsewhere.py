"""Programs on devices that are not here."""

import pytest
import torch
from torch import nn

from memopt.api import make_options
from memopt.calls.tracing import collect
from memopt.compilation.session import Session
from memopt.memory.aliasing import analyse
from memopt.memory.cost.devices import find
from memopt.memory.cost.elsewhere import moved
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.memory.timeline import timeline
from memopt.models import build
from memopt.program import tensors_of
from tests.support import capture


def joint(name):
    model = build(name, tiny=True)
    engine = make_options(backend="aten", device=torch.device("cpu")).engine
    session = Session(
        budget=None, backend=engine, passes=None, verify=False, names={}, resident=Resident(), table=CostTable()
    )
    return collect(model, (), model.example_inputs(2, labels=True), session)


MODELS = ["resnet18", "mobilenet_v3_small", "densenet121", "unet", "vit_b_16", "bert_base", "gpt2", "llama_1b"]


@pytest.mark.quick("unet", "resnet18")
@pytest.mark.parametrize("name", MODELS)
def test_training_programs_move_whole(name):
    (program,) = joint(name)
    there = moved(program, "cuda")
    there.check()
    assert [node.name for node in there.graph.nodes] == [node.name for node in program.graph.nodes]
    assert there.inputs == program.inputs and there.outputs == program.outputs and there.training
    for node in there.graph.nodes:
        assert all(tensor.device == torch.device("cuda", 0) for tensor in tensors_of(node)), node
    assert all(tensor.device.type == "cpu" for node in program.calls for tensor in tensors_of(node))
    assert moved(there, "cuda") is there and moved(program, "cpu") is program
    here, elsewhere = analyse(program).storages, analyse(there).storages
    assert [storage.producer.name for storage in here] == [storage.producer.name for storage in elsewhere]
    assert [-(-storage.nbytes // 512) * 512 for storage in here] == [storage.nbytes for storage in elsewhere]
    peak = timeline(there).peak_bytes
    assert timeline(program).peak_bytes <= peak <= timeline(program).peak_bytes + 512 * len(here)


def test_devices_in_arguments_move_too():
    class Model(nn.Module):
        def forward(self, x):
            return x + torch.arange(4, device=x.device) + torch.full((4,), 2.0, device=x.device)

    there = moved(capture(Model(), torch.randn(3, 4)), "cuda")
    there.check()
    assert {tensor.device.type for node in there.calls for tensor in tensors_of(node)} == {"cuda"}


def test_inputs_that_share_a_storage_still_do():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("part", self.weight.detach()[2:])

        def forward(self, x):
            return x @ self.weight + (x @ self.part.t()).sum()

    program = capture(Tied(), torch.randn(3, 8))
    there = moved(program, "cuda")
    there.check()
    shared = [len({analyse(p).of[node] for node in p.placeholders}) for p in (program, there)]
    assert shared[0] == shared[1]


def test_the_table_moves_for_its_target_only():
    program = capture(nn.Linear(4, 4), torch.randn(2, 4))
    assert CostTable().placed(program) is program
    assert tensors_of(CostTable(target=find("h100")).placed(program).calls[0])[0].is_cuda
