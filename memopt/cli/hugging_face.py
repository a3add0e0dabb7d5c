"""A Hugging Face folder (config.json and safetensors) as a module and example inputs, without the network."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memopt.cli.group import USAGE, CommandError

log = logging.getLogger(__name__)
_SEQUENCE = 128

# The names that the hub gives to tasks.
TASKS = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "image-classification": "AutoModelForImageClassification",
    "object-detection": "AutoModelForObjectDetection",
    "semantic-segmentation": "AutoModelForSemanticSegmentation",
    "depth-estimation": "AutoModelForDepthEstimation",
    "automatic-speech-recognition": "AutoModelForCTC",
    "speech-to-text": "AutoModelForSpeechSeq2Seq",
    "audio-classification": "AutoModelForAudioClassification",
}


def load(folder: Path, batch: int, training: bool, trust_pickle: bool) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Build the model that the folder's config names, and example inputs.

    Raises:
        CommandError: see `load_model`; or inputs that memopt cannot make up.
    """
    model = load_model(folder, trust_pickle)
    return model, _inputs(model, model.config, batch, training, folder)


def load_model(folder: Path, trust_pickle: bool, task: str | None = None, *, strict: bool = False) -> Any:
    """Build the model that the folder's config names, with the folder's weights where it has any.

    Raises:
        CommandError: no config, an unknown architecture or task, or only pickled weights; with `strict`, also weights
            that are missing or of other shapes, for which transformers makes up random ones.
    """
    if not (folder / "config.json").is_file():
        raise CommandError(f"{folder} is no Hugging Face folder: it has no config.json", USAGE)
    try:
        import transformers
    except ImportError as error:
        raise CommandError("reading a Hugging Face folder needs: pip install memopt[hf]") from error
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if log.getEffectiveLevel() > logging.INFO:
        transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers checks of a config is its own affair
        raise CommandError(f"{folder}: config.json cannot be read: {' '.join(str(error).split())}") from error
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if task is not None:
        kind = _head(transformers, config, task)
    return _model(transformers, kind, config, folder, trust_pickle, strict)


def _head(transformers: Any, config: Any, task: str) -> Any:
    """The class that has this head on this architecture."""
    if task not in TASKS:
        raise CommandError(f"unknown task {task!r}: use one of {', '.join(TASKS)}", USAGE)
    # The mapping from configs to classes is what the Auto classes themselves read.
    classes = getattr(transformers, TASKS[task])._model_mapping
    if type(config) not in classes:
        raise CommandError(f"{config.model_type} models have no head for {task}", USAGE)
    found = classes[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _model(transformers: Any, kind: Any, config: Any, folder: Path, trust_pickle: bool, strict: bool) -> Any:
    _check_shards(folder)
    safe = any(folder.glob("*.safetensors")) or any(folder.glob("*.safetensors.index.json"))
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.bin.index.json"))
    if pickled and not safe and not trust_pickle:
        raise CommandError(
            f"{folder} holds pickled weights, and reading them may run code; if you trust them, add --trust-pickle",
            USAGE,
        )
    try:
        if safe or pickled:
            loader = kind or transformers.AutoModel
            found, info = loader.from_pretrained(
                folder, local_files_only=True, use_safetensors=safe, output_loading_info=True
            )
            if strict:
                _refuse_misfits(folder, type(found).__name__, info)
            return found
        if strict:
            raise CommandError(f"{folder} has no weights", USAGE)
        log.info("%s has no weights: random ones are used", folder)
        return kind(config) if kind else transformers.AutoModel.from_config(config)
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(f"{folder}: the model cannot be built: {error}") from error


def _check_shards(folder: Path) -> None:
    """Refuse an index of weights that are missing, or that lie outside the folder."""
    for index in folder.glob("*.index.json"):
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CommandError(f"{index} cannot be read: {error}") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise CommandError(f"{index} names weights outside its folder ({name}): that is refused")
            if not (folder / name).is_file():
                raise CommandError(f"{index} names {name}, which does not exist")


def _refuse_misfits(folder: Path, kind: str, info: Mapping[str, Any]) -> None:
    """Refuse weights that are missing or misshapen; others than the model has are left out, with a word."""
    named = {
        entry: sorted(str(item[0] if isinstance(item, tuple) else item) for item in info.get(entry, ()))
        for entry in ("missing_keys", "mismatched_keys", "unexpected_keys")
    }
    *misfits, unused = named.values()
    parts = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for names, what in zip(misfits, ("missing", "of another shape"), strict=True)
        if names
    ]
    if parts:
        raise CommandError(f"{folder} does not fit {kind}: {'; '.join(parts)}")
    if unused:
        log.warning("%s: %d weights are not used: %s", folder, len(unused), ", ".join(unused))


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
