"""The size of a model on a command line: a row of vit.MODELS, or one with other fields."""

import argparse
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import vit
from runtime.ranges import whole

# What may follow the name of a row. Not `channels`: --channels is a flag, also of the images.
FIELDS: Mapping[str, int] = {  # the largest value of each
    field.name: 1 if field.type is bool else 10**6
    for field in fields(vit.ViTConfig)
    if field.name != "channels"
}


def model_config(text: str) -> vit.ViTConfig:
    """Return the shape of the model `base`, or `base:depth=6,mlp_width=1536`.

    ValueError, one sentence, for a name or a field that there is not, a value out of its range, and
    a width that is not a multiple of its heads.
    """
    name, colon, rest = text.partition(":")
    if name not in vit.MODELS:
        example = "or one of these with other fields, as base:depth=6,mlp_width=1536"
        raise ValueError(f"there is no model {name!r:.40}: use {', '.join(vit.MODELS)}, {example}")
    changes: dict[str, Any] = {}
    for part in rest.split(",") if colon else ():
        field, _, value = part.partition("=")
        if field not in FIELDS or field in changes:
            known = ", ".join(FIELDS)
            raise ValueError(f"{part!r:.40} in {text!r:.80} is not one FIELD=VALUE of {known}")
        try:
            least = 0 if field == "gated_mlp" else 1
            changes[field] = whole(least, FIELDS[field])(value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{field} of {text!r:.80}: {error}") from None
    try:
        return replace(vit.MODELS[name], **changes)
    except ValueError as error:
        raise ValueError(f"--model {text}: {error}") from None


def model_size(text: str) -> str:
    """Be an argparse type: the name of a model, as `model_config` reads it."""
    try:
        model_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
