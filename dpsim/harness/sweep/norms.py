"""The norms that a sweep over batch norm compares: batch norm's modes, no norm, and norms of each sample."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError, unknown
from dpsim.nn.tokens import MODELS, parse_model, with_norm
from dpsim.plan import BatchNormMode
from dpsim.records.sweep import Experiment

NORM_FIELDS = ("model", "batch_norm", "leaves")
"""The fields of a setting that say which norm is trained."""
NORMS_COMPARED = ("local", "leaf", "global", "none", "group")
_MODES = typing.get_args(BatchNormMode)
_SAMPLE_NORMS = ("none", "group", "instance", "layer")


def norm_cases(experiment: Experiment, norms: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """A case for each norm: a mode of batch norm (``local``, ``leaf``, ``global``), or what stands in its place.

    ``leaf`` has as many leaves as the most devices of the experiment, so that a leaf has a device's samples there.
    Raises ``ConfigError`` for an unknown norm, for one given twice, and for a model without batch norm.
    """
    model = str(experiment.value("model") or "cnn")
    for place, norm in enumerate(norms):
        if norm not in (*_MODES, *_SAMPLE_NORMS):
            raise unknown("norm", norm, (*_MODES, *_SAMPLE_NORMS))
        if norm in norms[:place]:
            raise ConfigError(f"the norm {norm} is given twice", allowed="different norms")
    if len(norms) < 2:
        raise ConfigError(f"{len(norms)} norm", allowed="two or more, which are compared")
    built_in = model.partition(":")[0] in MODELS
    if built_in and parse_model(model).norm != "batch":
        raise ConfigError(
            f"model {model!r} has no batch norm",
            allowed="a model with batch norm: cnn, resnet20, or mlp:256,256,norm=batch",
            remedy="choose another --model",
        )
    most = max(parse_devices(token)[0] for token in experiment.values("devices") or (1, 2))
    cases = []
    for norm in norms:
        if norm in _MODES:
            cases.append({"model": model, "batch_norm": norm, "leaves": most if norm == "leaf" else 0})
        elif built_in:
            cases.append({"model": with_norm(model, norm), "batch_norm": "local", "leaves": 0})
        else:
            raise ConfigError(
                f"the norm {norm} of model {model!r}, which is not built in",
                allowed=f"modes of its batch norm: {', '.join(_MODES)}",
                remedy="leave it out, or choose a built-in --model",
            )
    return tuple(cases)
