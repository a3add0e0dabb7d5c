import sys

import pytest
import torch

from memopt.cli.group import CommandError
from memopt.cli.loading import Request, load


@pytest.mark.parametrize("training", [True, False])
def test_name_of_a_built_in_model(training):
    found = load(Request("gpt2", batch=3, tiny=True, training=training))
    assert found.model.training == training
    assert ("labels" in found.inputs) == training
    assert found.inputs["input_ids"].shape[0] == 3


@pytest.mark.parametrize("spec", ["factories:pair", "factories:one_tensor"])
def test_factory_of_a_pair(folder, spec):
    found = load(Request(spec))
    assert found.model(*found.inputs).shape == ()


def test_factory_of_a_model_with_example_inputs(folder):
    found = load(Request("factories:Sized", batch=5))
    assert found.inputs["x"].shape == (5, 4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("nothing"), "no model 'nothing': give package.module:factory"),
        (Request("resnet5"), r"did you mean resnet\d+"),
        (Request("gpt2:small"), "no model 'gpt2:small'"),
        (Request(":"), "':' is no package.module:factory"),
        (Request("no.such.module:f"), "cannot import no.such.module"),
        (Request("factories:absent"), "factories has no callable absent"),
        (Request("factories:value"), "factories has no callable value"),
        (Request("factories:number"), r"returned int: it must return \(model, inputs\)"),
        (Request("factories:broken"), "raised RuntimeError: no disk"),
        (Request("factories:Tiny"), "without example_inputs"),
        (Request("gpt2", factory="factories:pair"), "--model goes with"),
        (Request("absent.pt2"), "no file absent.pt2"),
        (Request("absent.safetensors", factory="factories:pair"), "no file absent.safetensors"),
        (Request("gpt2:tiny", device="warp"), "unknown device 'warp': use cpu"),
        (Request("gpt2:tiny", device="meta"), "device 'meta' is not supported"),
        (Request("gpt2:tiny", device="cuda:99"), "no device 'cuda:99' on this machine"),
        (Request("."), "no Hugging Face folder: it has no config.json"),
    ],
)
def test_bad_requests_say_what_to_do_in_one_line(folder, request_, message):
    with pytest.raises(CommandError, match=message) as caught:
        load(request_)
    assert "\n" not in caught.value.message


def module(name):
    import importlib

    sys.path.insert(0, ".")
    return getattr(importlib.import_module("factories"), name)


def test_exported_program(folder):
    model, inputs = module("pair")()
    torch.export.save(torch.export.export(model, inputs), folder / "model.pt2")
    found = load(Request("model.pt2", training=False))
    torch.testing.assert_close(found.model(*found.inputs), model(*inputs))


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_state_dict_with_its_module(folder, suffix):
    model, inputs = module("pair")()
    path = folder / f"weights{suffix}"
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path)
    found = load(Request(str(path), factory="factories:pair"))
    torch.testing.assert_close(found.model(*found.inputs), model(*inputs))
    with pytest.raises(CommandError, match="say which module they are for, --model"):
        load(Request(str(path)))


def test_state_dict_of_another_module(folder):
    torch.save({"other.weight": torch.ones(1)}, folder / "weights.pt")
    with pytest.raises(
        CommandError, match=r"does not fit factories:pair: 2 missing \(linear.weight, linear.bias\); 1 unexpected"
    ) as caught:
        load(Request("weights.pt", factory="factories:pair"))
    assert "\n" not in caught.value.message


def test_pickled_module_is_refused_unless_trusted(folder):
    torch.save(module("Sized")(), folder / "model.pt")
    with pytest.raises(CommandError, match="reading it may run code; if you trust it, add --trust-pickle"):
        load(Request("model.pt"))
    assert load(Request("model.pt", trust_pickle=True, batch=7)).inputs["x"].shape == (7, 4)


@pytest.mark.parametrize("name", ["junk.pt", "junk.pt2", "junk.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a model"])
def test_junk_files_are_refused_in_one_line(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CommandError, match=f"{name} is n") as caught:
        load(Request(name, factory=None if name.endswith("pt2") else "factories:pair", training=False))
    assert caught.value.exit_code in (1, 2)


def test_weights_that_are_no_state_dict(folder):
    torch.save([1, 2], folder / "list.pt")
    with pytest.raises(CommandError, match="holds no state dict"):
        load(Request("list.pt", factory="factories:pair"))
