"""A Hugging Face folder (config.json and safetensors) as a module and example inputs, without the network."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from memopt.cli.group import USAGE, CommandError

log = logging.getLogger(__name__)
_SEQUENCE = 128


def load(folder: Path, batch: int, training: bool, trust_pickle: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Build the model that the folder's config names, and example inputs.

    Raises:
        CommandError: see `load_model`; or inputs that memopt cannot make up.
    """
    model = load_model(folder, trust_pickle)
    return model, _inputs(model, model.config, batch, training, folder)


def load_model(folder: Path, trust_pickle: bool) -> Any:
    """Build the model that the folder's config names, with the folder's weights where it has any.

    Raises:
        CommandError: no config, an unknown architecture, or only pickled weights.
    """
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} is no Hugging Face folder: it has no config.json", USAGE)
    try:
        import transformers
    except ImportError as error:
        raise CommandError("reading a Hugging Face folder needs: pip install memopt[hf]") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, KeyError, json.JSONDecodeError) as error:
        raise CommandError(f"{folder}: config.json cannot be read: {error}") from error
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    return _model(transformers, kind, config, folder, trust_pickle)


def _model(transformers: Any, kind: Any, config: Any, folder: Path, trust_pickle: bool) -> Any:
    safe, pickled = any(folder.glob("*.safetensors")), any(folder.glob("*.bin"))
    if pickled and not safe and not trust_pickle:
        raise CommandError(
            f"{folder} holds pickled weights, and reading them may run code; if you trust them, add --trust-pickle",
            USAGE,
        )
    try:
        if safe or pickled:
            loader = kind or transformers.AutoModel
            return loader.from_pretrained(folder, local_files_only=True, use_safetensors=safe)
        log.info("%s has no weights: random ones are used", folder)
        return kind(config) if kind else transformers.AutoModel.from_config(config)
    except Exception as error:
        raise CommandError(f"{folder}: the model cannot be built: {error}") from error


def _inputs(model: Any, config: Any, batch: int, training: bool, folder: Path) -> dict[str, Any]:
    """Random tokens or images; with labels in training, where the model's loss is of a kind that memopt knows."""
    kind, name = type(model).__name__, model.main_input_name
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {name: torch.randn(batch, getattr(config, "num_channels", 3), height, width)}
    elif name == "input_ids":
        length = min(_SEQUENCE, getattr(config, "max_position_embeddings", None) or _SEQUENCE)
        inputs = {name: torch.randint(config.vocab_size, (batch, length))}
    else:
        raise CommandError(f"{folder}: {kind} takes {name}: give package.module:factory instead", USAGE)
    if training and kind.endswith(("ImageClassification", "SequenceClassification")):
        inputs["labels"] = torch.randint(config.num_labels, (batch,))
    elif training and kind.endswith(("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")):
        inputs["labels"] = inputs[name].clone()
    elif config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs[name].clone()
    return inputs
