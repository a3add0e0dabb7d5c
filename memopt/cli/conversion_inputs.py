"""The example inputs of a conversion: as typed, as the source gives them, or derived from a Hugging Face config."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memopt.cli.group import USAGE, CommandError
from memopt.cli.loading import Loaded
from memopt.convert.inputs import InputSpec, named
from memopt.convert.key_values import is_hugging_face
from memopt.models.base import TokenModel

_BATCH, _SEQUENCE, _DECODER_SEQUENCE, _SAMPLES = 2, 16, 12, 3200
# Ids below this are often special (padding, end of a sentence), and some heads look for them.
_SPECIAL_IDS = 5
_PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "backbone_config")


def conversion_inputs(loaded: Loaded, specs: Sequence[InputSpec]) -> dict[str, Any]:
    """Inputs by name, of batch two and of a few tokens.

    Raises:
        CommandError: none are known for this model, or others than it takes; the message names those.
    """
    parameters = inspect.signature(loaded.model.forward).parameters
    takes = ", ".join(parameters) or "nothing"
    if specs:
        open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for spec in specs:
            if spec.name not in parameters and not open_ended:
                raise CommandError(f"{loaded.name} has no input {spec.name}: its forward takes {takes}", USAGE)
        return {spec.name: spec.make() for spec in specs}
    if is_hugging_face(loaded.model):
        return derived_inputs(loaded.model)
    if isinstance(loaded.model, TokenModel):
        # Its own example may be as long as the model allows, with a logit for each word at each place.
        inputs: dict[str, Any] = loaded.model.example_inputs(_BATCH, sequence=min(_SEQUENCE, loaded.model.sequence))
        return inputs
    if not loaded.inputs:
        raise CommandError(
            f"the inputs of {loaded.name} are not known: add --input NAME=2x16:int64 for each (forward takes {takes})",
            USAGE,
        )
    try:
        return named(loaded.model, loaded.inputs)
    except TypeError as error:
        raise CommandError(f"{loaded.name} does not take its example inputs: {error}", USAGE) from error


def derived_inputs(model: Any) -> dict[str, Any]:
    """The inputs that a model of transformers takes in inference, in the order of its forward.

    Raises:
        CommandError: its main input is of a kind that memopt does not know.
    """
    takes = inspect.signature(model.forward).parameters
    config, main = model.config, model.main_input_name
    makers = {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "input_features": _features,
        "input_values": _samples,
    }
    if main not in makers:
        raise CommandError(
            f"{type(model).__name__} takes {main}, whose shape is not known: add --input {main}=…:float32", USAGE
        )
    wanted = {main}
    if hasattr(config, "text_config") and hasattr(config, "vision_config"):
        wanted |= {"input_ids", "pixel_values"} & set(takes)
    made = {name: makers[name](config) for name in wanted}
    if "input_ids" in made:
        ids = made["input_ids"]
        if "attention_mask" in takes:
            made["attention_mask"] = torch.ones_like(ids)
        if "token_type_ids" in takes and (_setting(config, "type_vocab_size") or 0) > 1:
            made["token_type_ids"] = torch.zeros_like(ids)
        if "bbox" in takes:
            made["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.int64)
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = _tokens(config, _DECODER_SEQUENCE)
    # A checkpoint in float16 or bfloat16 takes its images and sounds in that type too.
    kind = getattr(model, "dtype", torch.float32)
    made = {name: value.to(kind) if value.is_floating_point() else value for name, value in made.items()}
    return {name: made[name] for name in takes if name in made}


def _tokens(config: Any, length: int = _SEQUENCE) -> torch.Tensor:
    vocabulary = _setting(config, "vocab_size") or 2
    most = _setting(config, "max_position_embeddings") or 0
    length = min(length, most) if most > 0 else length  # XLNet says -1: it has no limit
    return torch.randint(min(_SPECIAL_IDS, vocabulary - 1), vocabulary, (_BATCH, length))


def _pixels(config: Any) -> torch.Tensor:
    size = _setting(config, "image_size") or 224
    if isinstance(size, Mapping):
        size = (size.get("height"), size.get("width"))
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if len(sizes) != 2 or not all(isinstance(side, int) for side in sizes):
        raise CommandError("the size of pixel_values is not known: add --input pixel_values=…:float32", USAGE)
    height, width = sizes
    return torch.randn(_BATCH, _setting(config, "num_channels") or 3, height, width)


def _features(config: Any) -> torch.Tensor:
    bins, positions = _setting(config, "num_mel_bins"), _setting(config, "max_source_positions")
    if bins is None or positions is None:
        raise CommandError("the shape of input_features is not known: add --input input_features=…:float32", USAGE)
    return torch.randn(_BATCH, bins, 2 * positions)


def _samples(config: Any) -> torch.Tensor:
    bins, length = _setting(config, "num_mel_bins"), _setting(config, "max_length")
    if bins and length and length > 20:  # a spectrogram; 20 is what every config says of generation
        return torch.randn(_BATCH, length, bins)
    return torch.randn(_BATCH, _SAMPLES)


def _setting(config: Any, name: str) -> Any:
    """The setting, of the config or of one of its parts."""
    for part in (config, *(getattr(config, part, None) for part in _PARTS)):
        value = part.get(name) if isinstance(part, Mapping) else getattr(part, name, None)
        if value is not None:
            return value
    return None
