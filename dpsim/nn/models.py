"""The built-in models: ``mlp`` and ``cnn``, with optional widths (``mlp:512,256``, ``mlp:64x20``, ``cnn:16,32,64``)."""

from __future__ import annotations

import math
import re

import numpy as np
from numpy.typing import DTypeLike

from dpsim.errors import ConfigError, unknown
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.conv import Conv2D
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.dense import Dense
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.network import Network
from dpsim.nn.ops import Ops
from dpsim.nn.relu import ReLU
from dpsim.nn.shape import Flatten, GlobalAveragePool, MaxPool2D

MODELS = ("mlp", "cnn")
_DEFAULT_WIDTHS = {"mlp": (256, 256), "cnn": (32, 32, 32, 64, 64, 64)}
_FORMS = {"mlp": "mlp, mlp:512,256,128 (widths) or mlp:64x20 (width x depth)", "cnn": "cnn or cnn:16,32,64 (widths)"}
_SMALLEST_HALVED = 4  # pixels a side: a smaller picture is never halved
_LARGE = 16  # pixels a side: such a picture is halved after every block


def build_model(token: str, input_shape: Shape, classes: int, dtype: DTypeLike = np.float32) -> Network:
    """The model a token names, for samples of ``input_shape`` (H, W, C).

    ``mlp``: Flatten, then Dense-ReLU a width, then Dense. ``cnn``: Conv3x3-BatchNorm-ReLU a width, a maximum pool
    before a block that is wider than the last one (if the picture has 4 pixels a side) and after every block while it
    has 16, global average pool, Dense.
    Raises ``ConfigError`` for an unknown token or a bad width.
    """
    kind, _, text = token.partition(":")
    if kind not in MODELS:
        raise unknown("model", token, MODELS, remedy=f"write {_FORMS['mlp']}; or {_FORMS['cnn']}")
    widths = _parse_widths(token, kind, text) if text or ":" in token else _DEFAULT_WIDTHS[kind]
    if len(input_shape) != 3 or min(input_shape) < 1 or classes < 2:
        raise ConfigError(
            f"model {token!r} for samples of shape {input_shape} and {classes} classes",
            allowed="samples of (height, width, channels), and 2 classes or more",
        )
    ops = CpuOps()
    build = _mlp if kind == "mlp" else _cnn
    return Network(build(widths, input_shape, classes, dtype, ops), ops)


def _parse_widths(token: str, kind: str, text: str) -> tuple[int, ...]:
    error = ConfigError(f"model {token!r} is not understood", allowed=_FORMS[kind], remedy="give widths of 1 or more")
    repeated = re.fullmatch(r"(\d+)x(\d+)", text)
    if repeated and kind == "mlp":
        widths = (int(repeated[1]),) * int(repeated[2])
    elif re.fullmatch(r"\d+(,\d+)*", text):
        widths = tuple(int(width) for width in text.split(","))
    else:
        raise error
    if not widths or min(widths) < 1:
        raise error
    return widths


def _mlp(widths: tuple[int, ...], input_shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    layers: list[Layer] = [Flatten("flatten", ops, input_shape, dtype)]
    inputs = math.prod(input_shape)
    for number, width in enumerate(widths, start=1):
        layers.append(Dense(f"dense{number}", ops, inputs, width, dtype))
        layers.append(ReLU(f"relu{number}", ops, (width,), dtype))
        inputs = width
    layers.append(Dense(f"dense{len(widths) + 1}", ops, inputs, classes, dtype))
    return layers


def _cnn(widths: tuple[int, ...], input_shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    layers: list[Layer] = []
    shape, pools = input_shape, 0
    for number, width in enumerate(widths, start=1):
        side, wider = min(shape[:2]), number > 1 and width > widths[number - 2]
        if number > 1 and (side >= _LARGE or (wider and side >= _SMALLEST_HALVED)):
            pools += 1
            layers.append(MaxPool2D(f"pool{pools}", ops, shape, dtype))
            shape = layers[-1].output_shape
        layers.append(Conv2D(f"conv{number}", ops, shape, width, dtype))
        shape = layers[-1].output_shape
        layers.append(BatchNorm(f"bn{number}", ops, shape, dtype))
        layers.append(ReLU(f"relu{number}", ops, shape, dtype))
    layers.append(GlobalAveragePool("average", ops, shape, dtype))
    layers.append(Dense("dense1", ops, widths[-1], classes, dtype))
    return layers
