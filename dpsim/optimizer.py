"""The optimizer of a plan, ``Sgd``, ``AdamW`` or ``Lars``, by ``kind`` in a file. The updates are in ``dpsim.nn``."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import msgspec

from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides

_LearningRate = Annotated[float, Decides.BITS, "Learning rate (sgd 0.05, adamw 0.001, lars 1)."]
_Momentum = Annotated[float, Decides.BITS, "SGD's and LARS's momentum (0.9)."]
_WeightDecay = Annotated[
    float, Decides.BITS, "Weight decay; AdamW's is decoupled (sgd 0.001, adamw 0.01, lars 0.0005)."
]


class Sgd(Noun, frozen=True, tag_field="kind", tag="sgd"):
    """SGD in PyTorch's form: v = momentum v + g + weight_decay w; w -= learning_rate v.

    With ``nesterov``: w -= learning_rate (g + weight_decay w + momentum v).
    """

    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    learning_rate: _LearningRate = 0.05
    momentum: _Momentum = 0.9
    weight_decay: _WeightDecay = 0.0
    nesterov: Annotated[bool, Decides.BITS, "SGD with Nesterov's momentum: yes or no."] = False

    def __post_init__(self) -> None:
        _check_not_negative(self, "learning_rate", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise ConfigError("Nesterov's form with momentum 0", allowed="a momentum > 0", remedy="leave nesterov out")


class AdamW(Noun, frozen=True, tag_field="kind", tag="adamw"):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), in PyTorch's form; t counts steps from 1.

    w *= 1 - learning_rate weight_decay; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w -= learning_rate / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon).
    """

    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    learning_rate: _LearningRate = 1e-3
    beta1: Annotated[float, Decides.BITS, "AdamW's decay of the first moment (0.9)."] = 0.9
    beta2: Annotated[float, Decides.BITS, "AdamW's decay of the second moment (0.999)."] = 0.999
    epsilon: Annotated[float, Decides.BITS, "What AdamW adds to the root of the second moment (1e-8)."] = 1e-8
    weight_decay: _WeightDecay = 1e-2

    def __post_init__(self) -> None:
        _check_not_negative(self, "learning_rate", "weight_decay")
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise ConfigError(f"epsilon is {self.epsilon}", allowed="a finite number > 0")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}", allowed="0 or more, less than 1")


class Lars(Noun, frozen=True, tag_field="kind", tag="lars"):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, arXiv:1708.03888), for large batches.

    For each tensor: trust = trust_coefficient |w| / (|g| + weight_decay |w|), or 1 where |w| or |g| is 0;
    v = momentum v + learning_rate trust (g + weight_decay w); w -= v. Tensors of one dimension (biases, the scales of
    norms) have trust 1 and no weight decay.
    """

    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    learning_rate: _LearningRate = 1.0
    momentum: _Momentum = 0.9
    weight_decay: _WeightDecay = 5e-4
    trust_coefficient: Annotated[
        float,
        Decides.BITS,
        "LARS's trust: a tensor's step is about this share of its norm, times the rate (0.001).",
    ] = 1e-3

    def __post_init__(self) -> None:
        _check_not_negative(self, "learning_rate", "momentum", "weight_decay")
        if not (math.isfinite(self.trust_coefficient) and self.trust_coefficient > 0):
            raise ConfigError(f"trust_coefficient is {self.trust_coefficient}", allowed="a finite number > 0")


Optimizer = Sgd | AdamW | Lars
"""``slots`` names the arrays of the parameters' size that an optimizer keeps from step to step."""


def changed(base: Optimizer, name: str | None, settings: dict[str, Any]) -> Optimizer:
    """Return ``base`` with some settings replaced; another optimizer's own defaults if ``name`` names another.

    Raises ``ConfigError`` for an unknown name, and for a setting that the optimizer does not have.
    """
    kinds: dict[str, type[Sgd] | type[AdamW] | type[Lars]] = {"sgd": Sgd, "adamw": AdamW, "lars": Lars}
    if name is not None and name not in kinds:
        raise unknown("optimizer", name, kinds)
    kind = type(base) if name is None else kinds[name]
    base_settings = msgspec.structs.asdict(base) if isinstance(base, kind) else {}
    for key in settings:
        if key not in kind.__struct_fields__:
            raise ConfigError(
                f"{key} is {settings[key]}, and {kind.__struct_config__.tag} has none",
                allowed=", ".join(kind.__struct_fields__),
                remedy=f"leave {key} out, or choose another optimizer",
            )
    return kind(**(base_settings | settings))


def _check_not_negative(optimizer: Noun, *keys: str) -> None:
    for key in keys:
        value = getattr(optimizer, key)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{key} is {value}", allowed="a finite number >= 0")
