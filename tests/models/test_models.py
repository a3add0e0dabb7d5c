"""What holds for every reference model, and the table that names them."""

import copy

import pytest
import torch

from memopt import models
from memopt.models.base import next_token_loss

# Of the original publications and libraries: torchvision (resnet, mobilenet, densenet, vit), transformers (the rest).
PARAMETERS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "mobilenet_v3_large": 5_483_032,
    "mobilenet_v3_small": 2_542_856,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "unet": 31_030_658,
    "vit_b_16": 86_567_656,
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "llama_tiny": 15_191_712,
    "llama_1b": 1_235_814_400,
}
BUFFERS = {  # running means, variances and counters of the batch norms, by hand: 2 values a channel, 1 a norm
    "resnet18": 2 * 4800 + 20,
    "resnet50": 2 * 26560 + 53,
    "gpt2": 0,
    "llama_1b": 0,
}
every_model = pytest.mark.parametrize("name", models.names())


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name, **overrides):
    with torch.device("meta"):
        return models.build(name, **overrides)


def test_the_table_of_counts_is_complete():
    assert models.names() == tuple(PARAMETERS)


@every_model
def test_real_size(name):
    model = on_meta(name)
    assert count(model) == PARAMETERS[name]
    if name in BUFFERS:
        assert sum(buffer.numel() for buffer in model.buffers()) == BUFFERS[name]


@every_model
def test_logits_and_loss_at_real_size(name):
    model = on_meta(name)
    inputs = model.example_inputs(1, labels=True)
    assert all(value.device.type == "meta" for value in inputs.values())
    assert model(**inputs).shape == ()
    labels = inputs.pop("labels")
    logits = model(**inputs)
    if isinstance(model, models.TokenModel):
        assert logits.shape == (1, model.sequence, model.vocabulary)
        assert labels.shape == (1, model.sequence)
    else:
        assert logits.shape == (1, model.classes, *labels.shape[1:])


@every_model
def test_tiny_size_is_tiny_and_has_every_kind_of_module(name):
    tiny = models.build(name, tiny=True)
    assert 10_000 < count(tiny) < 1_000_000
    assert {type(module) for module in tiny.modules()} == {type(module) for module in on_meta(name).modules()}


@every_model
def test_loss_reaches_every_parameter(name):
    model = models.build(name, tiny=True)
    loss = model(**model.example_inputs(labels=True))
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@every_model
def test_a_few_steps_lower_the_loss(name):
    model = models.build(name, tiny=True, dropout=0.0)
    inputs = model.example_inputs(4, labels=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0]


@every_model
def test_evaluation_is_deterministic_and_double_precision_agrees(name):
    model = models.build(name, tiny=True).eval()
    inputs = model.example_inputs(3)
    with torch.no_grad():
        single = model(**inputs)
        assert torch.equal(single, model(**inputs))
        model.double()
        assert all(v.dtype in (torch.float64, torch.int64) for v in model.example_inputs().values())
        double = model(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()})
    assert single.dtype is torch.float32 and double.dtype is torch.float64
    assert single.shape[0] == 3
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4 * double.abs().max().item())


@every_model
def test_bfloat16_stays_bfloat16(name):
    model = models.build(name, tiny=True).to(torch.bfloat16)
    inputs = model.example_inputs(labels=True)
    loss = model(**inputs)
    loss.backward()
    assert loss.dtype is torch.bfloat16
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every_model
def test_dropout_is_drawn_in_training_alone(name):
    model = models.build(name, tiny=True, dropout=0.3)
    inputs = model.example_inputs(labels=True)
    seeded = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        seeded.append(model(**inputs))
    assert torch.equal(seeded[0], seeded[1])
    assert not torch.equal(seeded[0], seeded[2])


@every_model
def test_example_inputs_follow_the_seed_and_the_sizes(name):
    model = models.build(name, tiny=True)
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(model.example_inputs(3, labels=True))
    assert drawn[0].keys() == drawn[1].keys() and "labels" in drawn[0]
    assert all(torch.equal(drawn[0][key], drawn[1][key]) for key in drawn[0])
    if isinstance(model, models.TokenModel):
        assert model.example_inputs(5, sequence=7)["input_ids"].shape == (5, 7)
        with pytest.raises(ValueError, match="sequence must be at least 1, not 0"):
            model.example_inputs(sequence=0)
    else:
        resolution = 2 * model.resolution
        assert model.example_inputs(5, resolution=resolution)["images"].shape[2:] == (resolution, resolution)
        with pytest.raises(ValueError, match="resolution must be at least 1, not -1"):
            model.example_inputs(resolution=-1)
    with pytest.raises(ValueError, match="batch must be at least 1, not 0"):
        model.example_inputs(0)


@every_model
def test_export(name):
    model = models.build(name, tiny=True).eval()
    inputs = model.example_inputs()
    exported = torch.export.export(model, (), inputs)
    with torch.no_grad():
        assert torch.equal(exported.module()(**inputs), model(**inputs))


@every_model
def test_compile_without_graph_breaks(name):
    torch.compiler.reset()
    model = models.build(name, tiny=True, dropout=0.0)
    reference = copy.deepcopy(model)
    inputs = model.example_inputs(labels=True)
    found = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    expected = reference(**inputs)
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    for (key, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), key


@pytest.mark.parametrize("name", ["bert_base", "gpt2", "llama_1b"])
def test_tied_weights_are_one_parameter(name):
    model = copy.deepcopy(models.build(name, tiny=True)).double()
    tokens = model.encoder.tokens if name == "bert_base" else model.tokens
    assert model.head.weight is tokens.weight


def test_build_by_suffix_and_overrides():
    assert count(models.build("gpt2:tiny")) == count(models.build("gpt2", tiny=True))
    assert len(models.build("gpt2:tiny", layers=5).blocks) == 5
    assert models.build("resnet18:tiny", classes=7).fc.out_features == 7


@pytest.mark.parametrize(
    ("name", "hint"), [("resnet81", "did you mean resnet18"), ("gpt2:small", "gpt2:small"), ("", "no model ''")]
)
def test_unknown_names_list_the_known_ones(name, hint):
    with pytest.raises(ValueError, match=hint) as caught:
        models.build(name)
    assert "\n" not in str(caught.value)
    assert all(known in str(caught.value) for known in models.names())


def test_unknown_options_list_the_known_ones():
    with pytest.raises(TypeError, match=r"model gpt2_medium has no option 'depth'; it has: layers, width, heads"):
        models.build("gpt2_medium", depth=3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"heads": 5}),
        ("bert_base", {"heads": 5}),
        ("bert_base", {"mask_token": 128}),
        ("llama_1b", {"heads": 5}),
        ("llama_1b", {"kv_heads": 3}),
        ("vit_b_16", {"patch": 7}),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(name, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} "):
        models.build(name, tiny=True, **options)


@pytest.mark.parametrize("name", ["gpt2", "bert_base"])
def test_sequences_beyond_the_positions_are_refused(name):
    model = models.build(name, tiny=True)
    with pytest.raises(ValueError, match="sequences of 33 tokens, but the model has 32 positions"):
        model(**model.example_inputs(sequence=33))


def test_next_token_loss_predicts_the_label_one_further_on():
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[1, 3] = -100
    rows = [(b, t) for b in range(2) for t in range(4) if labels[b, t + 1] >= 0]
    expected = -sum(logits[b, t].log_softmax(0)[labels[b, t + 1]] for b, t in rows) / len(rows)
    torch.testing.assert_close(next_token_loss(logits, labels), expected)
    with pytest.raises(ValueError, match="two tokens or more"):
        next_token_loss(logits[:, :1], labels[:, :1])
