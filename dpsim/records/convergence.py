"""The file of a model's convergence: steps to target losses against the global batch."""

from __future__ import annotations

from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.dtypes import ComputeDtype, in_dtype
from dpsim.errors import ConfigError

SCHEMA = "dpsim.convergence/1"


class Convergence(Noun, frozen=True):
    """S = ``min_steps`` (1 + ``noise_batch`` / B) steps to ``target_loss`` on the training set, at global batch B.

    It was fitted between the ``batches`` and holds for this model, data set, rule of the learning rate and dtype.
    """

    model: str
    dataset: str
    target_loss: float
    min_steps: float
    noise_batch: float
    batches: tuple[int, ...]
    learning_rate: float
    reference_batch: int
    momentum: float
    gradient_noise_batch: float | None = None
    compute_dtype: ComputeDtype = "float32"

    @property
    def name(self) -> str:
        """The model, the data and, unless it is float32, what products are computed in."""
        return f"{self.model} on {self.dataset}{in_dtype(self.compute_dtype)}"

    def __post_init__(self) -> None:
        if not self.min_steps > 0 or not self.noise_batch > 0 or not self.batches:
            raise ConfigError(
                f"least steps of {self.min_steps}, a noise batch of {self.noise_batch}, batches {self.batches}",
                allowed="numbers > 0, and the batches that were fitted",
            )


class ConvergenceFile(Noun, frozen=True):
    """The convergence of some trainings; ``dpsim predict --target-loss LOSS:FILE`` reads it."""

    convergence: tuple[Convergence, ...]
    schema: str = SCHEMA

    def find(self, target_loss: float) -> Convergence:
        """The convergence to this target. Raises ``ConfigError``."""
        matching = [each for each in self.convergence if each.target_loss == target_loss]
        if len(matching) != 1:
            targets = ", ".join(f"{each.target_loss:g} ({each.model})" for each in self.convergence)
            raise ConfigError(
                f"{len(matching)} fits for a target loss of {target_loss:g}",
                allowed=f"a target of which the file has one fit: {targets or 'it has none'}",
                remedy="choose another --target-loss, or a file of one training",
            )
        return matching[0]


def read(path: Path) -> ConvergenceFile:
    """Read a convergence file. Raises ``FileFormatError``."""
    return codec.read(path, ConvergenceFile, "convergence", SCHEMA)
