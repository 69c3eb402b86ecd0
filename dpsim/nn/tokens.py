"""The parts of a model token: a kind, widths, and settings (``mlp:512,256,norm=layer,dropout=0.2``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dpsim.errors import ConfigError, unknown
from dpsim.nn.column_blocks import check_column_blocks
from dpsim.nn.layers import check_crop, check_flip, check_rate

NORMS = ("batch", "layer", "instance", "group", "none")
RESNETS = {f"resnet{depth}": (16, 32, 64) for depth in (20, 32, 44, 56)}
_DEFAULT_WIDTHS = {"mlp": (256, 256), "cnn": (32, 32, 32, 64, 64, 64), **RESNETS}
_MOST_WEIGHTS = 2**28
"""The most weights between the layers: 1 GiB, of which training holds several copies."""
MODELS = tuple(_DEFAULT_WIDTHS)
_NUMBERS: dict[str, tuple[Callable[[str], Any], Callable[[Any], None], str]] = {
    "dropout": (float, check_rate, "a number from 0 to less than 1, like dropout=0.1"),
    "crop": (int, check_crop, "a whole number of pixels, like crop=4"),
    "flip": (float, check_flip, "a number from 0 to 1, like flip=0.5"),
    "column_blocks": (int, check_column_blocks, "a whole number of 1 or more, like column_blocks=4"),
}
_SETTINGS = ("norm", *_NUMBERS)
_AFTER = "then settings: norm=group, dropout=0.1, crop=4, flip=0.5, column_blocks=4"
_FORMS = {
    "mlp": f"mlp, mlp:512,256,128 (widths) or mlp:64x20 (width x depth), {_AFTER}",
    "cnn": f"cnn or cnn:16,32,64 (widths), {_AFTER}",
} | {name: f"{name}, {_AFTER}" for name in RESNETS}


@dataclass(frozen=True, kw_only=True)
class ModelToken:
    """The parts of a token. ``norm`` is one of ``NORMS``; ``dropout`` the share of elements dropped.

    ``crop`` pixels and ``flip`` rate: see ``dpsim.nn.layers``; ``column_blocks``: see ``dpsim.nn.column_blocks``.
    """

    kind: str
    widths: tuple[int, ...]
    norm: str
    dropout: float = 0.0
    crop: int = 0
    flip: float = 0.0
    column_blocks: int = 1


def parse_model(token: str) -> ModelToken:
    """Return the parts of a token. Raises ``ConfigError`` for an unknown model, setting or value."""
    kind, colon, text = token.partition(":")
    if kind not in MODELS:
        forms = f"{_FORMS['mlp']}; or {_FORMS['cnn']}"
        raise unknown("model", token, MODELS, remedy=f"write {forms}")
    parsed = ModelToken(kind=kind, widths=_DEFAULT_WIDTHS[kind], norm="none" if kind == "mlp" else "batch")
    if not colon:
        return parsed
    parts = text.split(",")
    widths = [part for part in parts if "=" not in part]
    settings = [part.partition("=") for part in parts if "=" in part]
    if widths:
        parsed = replace(parsed, widths=_parse_widths(token, kind, ",".join(widths)))
    names = [name for name, _, _ in settings]
    for name, _, value in settings:
        if name not in _SETTINGS:
            raise unknown(f"setting of model {token!r}:", name, _SETTINGS)
        if names.count(name) > 1:
            raise ConfigError(f"model {token!r} sets {name} twice", allowed=f"{name} once")
        parsed = _with(parsed, token, name, value)
    return parsed


def with_norm(token: str, norm: str) -> str:
    """Return a model's token with another of ``NORMS``: ``cnn:16,32`` and ``group`` is ``cnn:16,32,norm=group``.

    Raises ``ConfigError`` for an unknown model or norm.
    """
    return with_setting(token, "norm", norm)


def with_setting(token: str, name: str, value: str) -> str:
    """Return the token of the same model with another value of a setting. Raises ``ConfigError`` as ``parse_model``."""
    kind, _, text = token.partition(":")
    parts = [part for part in text.split(",") if part and not part.startswith(f"{name}=")]
    changed = f"{kind}:{','.join([*parts, f'{name}={value}'])}"
    return token if parse_model(changed) == parse_model(token) else changed


def norm_of(model: str, batch_norm: str) -> str:
    """Return the norm of a model: the mode of its batch norm, or the norm of a built-in model without batch norm."""
    if model.partition(":")[0] in MODELS and (norm := parse_model(model).norm) != "batch":
        return norm
    return batch_norm


def _with(parsed: ModelToken, token: str, name: str, value: str) -> ModelToken:
    """Return the token with one setting. Raises ``ConfigError``."""
    if name == "norm":
        if value not in NORMS:
            raise unknown("norm", value, NORMS)
        return replace(parsed, norm=value)
    kind, check, form = _NUMBERS[name]
    try:
        number = kind(value)
    except ValueError:
        raise ConfigError(f"model {token!r} has {name} {value!r}", allowed=form) from None
    check(number)
    return replace(parsed, **{name: number})


def _parse_widths(token: str, kind: str, text: str) -> tuple[int, ...]:
    error = ConfigError(f"model {token!r} is not understood", allowed=_FORMS[kind], remedy="give widths of 1 or more")
    repeated = re.fullmatch(r"(\d{1,6})x(\d{1,4})", text)
    if repeated and kind == "mlp":
        widths = (int(repeated[1]),) * int(repeated[2])
    elif re.fullmatch(r"\d{1,6}(,\d{1,6})*", text) and kind not in RESNETS:
        widths = tuple(int(width) for width in text.split(","))
    else:
        raise error
    if not widths or min(widths) < 1:
        raise error
    weights = sum(before * after for before, after in itertools.pairwise(widths))
    if weights > _MOST_WEIGHTS:
        raise ConfigError(
            f"model {token!r} has {weights:,} weights and more",
            allowed=f"{_MOST_WEIGHTS:,}",
            remedy="give smaller widths, or fewer",
        )
    return widths
