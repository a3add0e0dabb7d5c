"""The snippets of the README and the guide: each runs as it stands, on a tiny model; calls that take long are read."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
SNIPPETS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", ROOT / "docs" / "guide.md")
    for number, block in enumerate(BLOCK.findall(page.read_text()))
]
# Loops of libraries that are not in every environment: `make test-integrations` installs them.
NEEDS = {
    "from accelerate": "accelerate",
    "memopt.integrations.hf": "accelerate",
    "memopt.integrations.lightning": "lightning",
    "memopt.export(": "onnxscript",
}
LONG = "memopt.compare("  # a list of calls, each on its own engine


def names(folder, block):
    """What a user has before each snippet."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids} if ".loss" in block else {"input_ids": ids}
    found = {"torch": torch, "memopt": memopt, "model": model, "batch": batch, "loader": [batch, batch]}
    found["optimizer"] = torch.optim.AdamW(model.parameters())
    if "memopt.integrations.hf" in block:
        import transformers

        options = {"use_cpu": True, "report_to": [], "max_steps": 2, "disable_tqdm": True, "save_strategy": "no"}
        found["args"] = transformers.TrainingArguments(output_dir=str(folder), **options)
        found["data"] = [{"input_ids": row, "labels": row} for row in ids]
        found["Trainer"] = transformers.Trainer
    if "memopt.integrations.lightning" in block:
        found |= lightning_names()
    return found


def lightning_names():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 8)

        def training_step(self, batch, batch_idx):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return {"L": lightning, "module": Module(), "loader": torch.utils.data.DataLoader(torch.randn(8, 8), 4)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", [each for each in SNIPPETS if LONG not in each.values[0]])
def test_it_runs(block, tmp_path, monkeypatch, capsys):
    for module, library in NEEDS.items():
        if module in block:
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    planned = functools.partial(memopt.compile, backend="aten")  # seconds less: what is tested is the snippet
    if "integrations" not in block:
        monkeypatch.setattr(memopt, "compile", planned)
    exec(compile(block, "snippet", "exec"), names(tmp_path, block))


@pytest.mark.parametrize("block", [each for each in SNIPPETS if LONG in each.values[0]])
def test_every_call_is_one_that_there_is(block):
    calls = [
        node
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "memopt"
    ]
    assert len(calls) > 9
    for call in calls:
        function = getattr(memopt, call.func.attr)
        keywords = {item.arg: None for item in call.keywords}
        inspect.signature(function).bind(*call.args, **keywords)


def test_every_link_leads_to_a_file():
    for page in (ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs" / "results.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
