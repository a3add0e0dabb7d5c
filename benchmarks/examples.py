"""Write the example reports of docs/examples: a ResNet-50 inference, a GPT-2 medium training plan, a BERT conversion.

python benchmarks/examples.py              all of them anew, which takes a few minutes
python benchmarks/examples.py --render     the pages anew from the JSON that is there
"""

from __future__ import annotations

import argparse
import site
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import memopt
from memopt import models
from memopt.report import load, render, write_whole

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "examples"
CONVERSION = "bert_conversion"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", action="store_true", help="only make the pages anew, from the JSON")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EXAMPLES)}; all by default")
    options = parser.parse_args()
    for name in options.names or EXAMPLES:
        if not options.render:
            torch.manual_seed(0)
            write_whole(FOLDER / f"{name}.json", without_paths(EXAMPLES[name]()))
        page = page_of(name)
        write_whole(FOLDER / f"{name}.html", page)
        print(f"{name}: {len(page) / 1e6:.2f} MB", file=sys.stderr)


def page_of(name: str) -> str:
    """The page of an example, from its JSON."""
    path = FOLDER / f"{name}.json"
    if name != CONVERSION:
        return render(load(path), "html")
    from memopt.convert import page, record

    return page.to_html(record.load(path))


def without_paths(text: str) -> str:
    """The text with paths as they are from the project's root, and from where packages are installed."""
    for folder in (str(ROOT), *site.getsitepackages()):
        text = text.replace(f"{folder}/", "")
    return text


def resnet50_inference() -> str:
    """ResNet-50 on 64 images in one preplanned arena, every rewrite proved."""
    model = models.build("resnet50").eval()
    return render(memopt.plan(model, model.example_inputs(64), backend="static", verify=True), "json")


def gpt2_medium_training() -> str:
    """GPT-2 medium, 16 sequences of 1024 in bfloat16, with AdamW: within 10 GB of an H100 that need not be here."""
    model = models.build("gpt2_medium").to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = model.example_inputs(16, sequence=1024, labels=True)
    return render(memopt.plan(model, inputs, "10GB", optimizer=optimizer, device="h100"), "json")


def bert_conversion() -> str:
    """BERT base to an ONNX file, batch and sequence open."""
    from memopt.convert.pipeline import convert_module

    model = models.build("bert_base").eval()
    return convert_module(model, model.example_inputs(2, sequence=64), None, source="bert_base").to_json()


EXAMPLES: dict[str, Callable[[], str]] = {
    "resnet50_inference": resnet50_inference,
    "gpt2_medium_training": gpt2_medium_training,
    CONVERSION: bert_conversion,
}

if __name__ == "__main__":
    main()
