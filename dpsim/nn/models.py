"""The built-in models: ``mlp``, ``cnn`` and ``resnet20`` to ``resnet56``, from the parts of their tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

from dpsim.errors import ConfigError
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.column_blocks import cut_columns
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.layer import Layer, Shape
from dpsim.nn.layers import Augment, Conv2D, Dense, Dropout, Flatten, GlobalAveragePool, MaxPool2D, ReLU
from dpsim.nn.network import Network
from dpsim.nn.ops import Ops
from dpsim.nn.residual import Subsample, residual
from dpsim.nn.sample_norm import GroupNorm, InstanceNorm, LayerNorm
from dpsim.nn.tokens import RESNETS, ModelToken, parse_model

_SMALLEST_HALVED = 4  # pixels a side: a smaller picture is never halved
_LARGE = 16  # pixels a side: such a picture is halved after every block
_GROUPS = 8  # of channels in a group norm, or the next smaller power of two that leaves 2 channels or more in each
_NORM_NAMES = {"batch": "bn", "layer": "ln", "instance": "in", "group": "gn"}


def build_model(
    token: str,
    input_shape: Shape,
    classes: int,
    dtype: DTypeLike = np.float32,
    *,
    label_smoothing: float = 0.0,
    ops: Ops | None = None,
) -> Network:
    """Build the model of a token for samples of ``input_shape`` (H, W, C), computed with ``ops`` (or ``CpuOps``).

    ``mlp``: Flatten, then Dense-ReLU a width, then Dense. ``cnn``: Conv3x3-BatchNorm-ReLU a width, a maximum pool
    before a block that is wider than the last one (if the picture has 4 pixels a side) and after every block while it
    has 16, global average pool, Dense. ``resnetN``, N = 6n+2: the residual networks for CIFAR-10 of He et al.
    (arXiv:1512.03385, section 4.2), with shortcuts that have no parameters.

    ``norm`` replaces the batch norm of ``cnn`` and ``resnetN`` (``none``: no norm) and adds one before each ReLU of
    ``mlp``; ``dropout`` comes after each ReLU of ``mlp`` and before the last Dense of the others. With ``crop`` or
    ``flip`` pictures are first moved and mirrored, in training. ``column_blocks``: see ``dpsim.nn.column_blocks``.
    Raises ``ConfigError`` for an unknown token or a bad width or setting.
    """
    parsed = parse_model(token)
    if len(input_shape) != 3 or min(input_shape) < 1 or classes < 2:
        raise ConfigError(
            f"model {token!r} for samples of shape {input_shape} and {classes} classes",
            allowed="samples of (height, width, channels), and 2 classes or more",
        )
    ops = CpuOps() if ops is None else ops
    layers = _BUILDERS[parsed.kind](parsed, input_shape, classes, dtype, ops)
    if parsed.crop or parsed.flip:
        layers.insert(0, Augment("augment", ops, input_shape, dtype, parsed.crop, parsed.flip))
    return Network(cut_columns(layers, parsed.column_blocks), ops, label_smoothing)


def _mlp(model: ModelToken, input_shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    layers: list[Layer] = [Flatten("flatten", ops, input_shape, dtype)]
    inputs = math.prod(input_shape)
    for number, width in enumerate(model.widths, start=1):
        layers.append(Dense(f"dense{number}", ops, inputs, width, dtype))
        layers += _norm(model.norm, "", number, ops, (width,), dtype)
        layers.append(ReLU(f"relu{number}", ops, (width,), dtype))
        layers += _dropout(model, number, ops, (width,), dtype)
        inputs = width
    layers.append(Dense(f"dense{len(model.widths) + 1}", ops, inputs, classes, dtype))
    return layers


def _cnn(model: ModelToken, input_shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    layers: list[Layer] = []
    shape, pools, widths = input_shape, 0, model.widths
    for number, width in enumerate(widths, start=1):
        side, wider = min(shape[:2]), number > 1 and width > widths[number - 2]
        if number > 1 and (side >= _LARGE or (wider and side >= _SMALLEST_HALVED)):
            pools += 1
            layers.append(MaxPool2D(f"pool{pools}", ops, shape, dtype))
            shape = layers[-1].output_shape
        layers.append(Conv2D(f"conv{number}", ops, shape, width, dtype))
        shape = layers[-1].output_shape
        layers += _norm(model.norm, "", number, ops, shape, dtype)
        layers.append(ReLU(f"relu{number}", ops, shape, dtype))
    return [*layers, *_classifier(model, shape, classes, dtype, ops)]


def _resnet(model: ModelToken, input_shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    blocks = (int(model.kind.removeprefix("resnet")) - 2) // 6
    conv = Conv2D("conv1", ops, input_shape, model.widths[0], dtype)
    shape = conv.output_shape
    layers: list[Layer] = [conv, *_norm(model.norm, "", 1, ops, shape, dtype), ReLU("relu1", ops, shape, dtype)]
    for stage, width in enumerate(model.widths, start=1):
        for block in range(1, blocks + 1):
            stride = 2 if stage > 1 and block == 1 else 1
            layers += _block(f"stage{stage}.block{block}.", model.norm, shape, width, stride, dtype, ops)
            shape = layers[-1].output_shape
    return [*layers, *_classifier(model, shape, classes, dtype, ops)]


def _block(
    prefix: str, norm: str, input_shape: Shape, width: int, stride: int, dtype: DTypeLike, ops: Ops
) -> list[Layer]:
    """Return conv-norm-ReLU-conv-norm with a shortcut, then ReLU; the first convolution has the stride."""
    conv = Conv2D(f"{prefix}conv1", ops, input_shape, width, dtype, stride=stride)
    shape = conv.output_shape
    body: list[Layer] = [conv, *_norm(norm, prefix, 1, ops, shape, dtype), ReLU(f"{prefix}relu1", ops, shape, dtype)]
    body += [Conv2D(f"{prefix}conv2", ops, shape, width, dtype), *_norm(norm, prefix, 2, ops, shape, dtype)]
    changes = input_shape != shape
    shortcut = [Subsample(f"{prefix}subsample", ops, input_shape, width, dtype, stride)] if changes else []
    return [*residual(prefix.rstrip("."), body, shortcut), ReLU(f"{prefix}relu2", ops, shape, dtype)]


def _classifier(model: ModelToken, shape: Shape, classes: int, dtype: DTypeLike, ops: Ops) -> list[Layer]:
    return [
        GlobalAveragePool("average", ops, shape, dtype),
        *_dropout(model, 1, ops, shape[-1:], dtype),
        Dense("dense1", ops, shape[-1], classes, dtype),
    ]


def _dropout(model: ModelToken, number: int, ops: Ops, shape: Shape, dtype: DTypeLike) -> list[Layer]:
    return [Dropout(f"dropout{number}", ops, shape, dtype, model.dropout)] if model.dropout else []


def _norm(norm: str, prefix: str, number: int, ops: Ops, shape: Shape, dtype: DTypeLike) -> list[Layer]:
    if norm == "none":
        return []
    name = f"{prefix}{_NORM_NAMES[norm]}{number}"
    if norm == "group":
        groups = next((g for g in (_GROUPS, 4, 2) if shape[-1] % (2 * g) == 0), 1)
        return [GroupNorm(name, ops, shape, dtype, groups)]
    return [{"batch": BatchNorm, "layer": LayerNorm, "instance": InstanceNorm}[norm](name, ops, shape, dtype)]


_BUILDERS = {"mlp": _mlp, "cnn": _cnn} | dict.fromkeys(RESNETS, _resnet)
