"""The cases that are timed (models, batches, device counts, leaves, batch-norm modes), and their record."""

from __future__ import annotations

from dpsim.codec import Noun
from dpsim.plan import BatchNormMode
from dpsim.records.sweep import Environment

SCHEMA = "dpsim.reproducible-cost/1"
MLP = "mlp:2048,2048,2048"
PLAIN, AGAIN = "plain", "plain again"


class Mode(Noun, frozen=True):
    """The number of leaves (0: plain training) and the batch-norm mode."""

    leaves: int
    batch_norm: BatchNormMode = "leaf"

    @property
    def name(self) -> str:
        """``8 leaves, batch norm leaf``."""
        return f"{self.leaves} leaves, batch norm {self.batch_norm}" if self.leaves else f"batch norm {self.batch_norm}"


class Case(Noun, frozen=True):
    """Plain training of a model (batch norm ``local``), and the modes to compare with it, at one global batch.

    ``limit`` is the largest allowed ratio of the first mode's step to the plain one (None: no limit is set).
    """

    model: str
    dataset: str
    devices: int
    global_batch: int
    modes: tuple[Mode, ...]
    limit: float | None = None


class Measured(Noun, frozen=True):
    """A case, and seconds of a step of ``plain``, ``plain again`` and each mode, one number a round."""

    case: Case
    step_s: dict[str, tuple[float, ...]]


class CostRecord(Noun, frozen=True):
    """All cases of one run."""

    environment: Environment
    measured_from: str
    measured_until: str
    measured: tuple[Measured, ...]
    schema: str = SCHEMA


def cases() -> tuple[Case, ...]:
    """Small models with every mode, then the large MLP over the global batch, on one and two devices."""
    leaves = tuple(Mode(leaves=count) for count in (8, 32, 64))
    norms = (*leaves, Mode(leaves=8, batch_norm="global"), Mode(leaves=0, batch_norm="global"))
    images, digits, flat = "synthetic:32x32x3,classes=10", "digits", "synthetic:28x28x1,classes=10"

    cases = []
    for devices in (1, 2):
        for model, dataset in (("resnet20", images), ("cnn", images), ("cnn", digits)):
            cases.append(Case(model=model, dataset=dataset, devices=devices, global_batch=128, modes=norms, limit=1.10))
        for batch in (1024, 512, 256, 128, 64):
            limit = {1: 1.20, 2: 1.15}[devices] if batch == 1024 else None
            cases.append(Case(model=MLP, dataset=flat, devices=devices, global_batch=batch, modes=leaves, limit=limit))
    return tuple(cases)
