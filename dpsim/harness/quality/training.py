"""One training of a study, on one rank: its losses, its test, and its gradients' norms on the way to a target."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from dpsim import rng
from dpsim.data import Dataset, load_dataset
from dpsim.data.sharding import check_batch
from dpsim.errors import ConfigError
from dpsim.harness.measurement.environment import stamp
from dpsim.machine import Network as Link
from dpsim.nn import build_model
from dpsim.nn.network import Network, NoEvents
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.records.quality import Evaluation, TrainingCase, TrainingRun
from dpsim.replica import Array, Batch
from dpsim.runtime.trainer import Trainer

_SHARES = 8
"""Parts of a global batch whose gradients are compared with that of the whole."""
_EVALUATE_EVERY = 0.03
"""The training set is evaluated each time the steps have grown by this share: the target's step is interpolated."""


def open_training(case: TrainingCase) -> tuple[Trainer, Network]:
    """A trainer of the case on this rank alone, and its replica. Raises ``ConfigError``."""
    if case.global_batch % case.local_batch:
        raise ConfigError(
            f"local batch {case.local_batch} of a global batch of {case.global_batch}",
            allowed="a divisor of the global batch",
        )
    dataset = load_dataset(case.dataset, case.seed)
    check_batch(len(dataset.train_y), case.global_batch)
    replica = build_model(case.model, dataset.input_shape, dataset.classes)
    plan = Plan(
        devices=1,
        global_batch=case.global_batch,
        leaves=case.global_batch // case.local_batch,
        batch_norm=case.batch_norm,
        algorithm="two-shot",
        optimizer=Sgd(learning_rate=case.learning_rate, momentum=case.momentum),
        compute_dtype=case.compute_dtype,
    )
    return Trainer(replica, dataset, plan, MPI.COMM_SELF, Link.parse("node"), seed=case.seed), replica


def bound_copy(case: TrainingCase, trainer: Trainer) -> tuple[Network, dict[str, Array]]:
    """A replica with the trainer's own parameters and other gradients, for measurements that leave training alone."""
    dataset = trainer.dataset
    replica = build_model(case.model, dataset.input_shape, dataset.classes)
    gradients = {name: np.zeros_like(value) for name, value in trainer.runner.parameters.items()}
    replica.multiply_in(case.compute_dtype)
    replica.train_in_leaves(True, None)
    replica.use(table=replica.code_table())
    replica.bind(trainer.runner.parameters, gradients)
    return replica, gradients


def train(case: TrainingCase) -> TrainingRun:
    """Train, and test. A run with a target ends there, and where it does not get there after its last step."""
    trainer, replica = open_training(case)
    evaluations: list[Evaluation] = []
    copy, gradients = bound_copy(case, trainer)
    sums: list[tuple[float, int]] = []
    for step in range(1, case.steps + 1):
        outcome = trainer.step()
        sums.append((outcome.sums.loss, outcome.global_samples))
        if case.target_loss and step >= (1 + _EVALUATE_EVERY) * (evaluations[-1].step if evaluations else 0):
            loss = _training_set_loss(replica, trainer.dataset)
            small, big = _norms(copy, gradients, case, trainer.dataset, step)
            evaluations.append(Evaluation(step=step, loss=loss, small_norm=small, big_norm=big))
            if loss <= case.target_loss:
                break
    test, every = trainer.evaluate(), trainer.steps_per_epoch
    run = TrainingRun(
        case=case,
        measured_at=stamp(),
        loss_every=every,
        losses=_epoch_losses(sums, every),
        training_set_loss=_training_set_loss(replica, trainer.dataset),
        test_loss=test.loss / test.samples,
        test_accuracy=test.correct / test.samples,
        evaluations=tuple(evaluations),
    )
    trainer.close()
    return run


def _epoch_losses(sums: list[tuple[float, int]], every: int) -> tuple[float, ...]:
    """The mean loss a sample of each whole epoch; of all steps where there is none."""
    whole = len(sums) // every * every or len(sums)
    blocks = [sums[start : start + every] for start in range(0, whole, every)]
    return tuple(sum(loss for loss, _ in block) / sum(count for _, count in block) for block in blocks)


def _training_set_loss(replica: Network, dataset: Dataset) -> float:
    samples = len(dataset.train_y)
    return replica.evaluate(*dataset.train_batch(np.arange(samples))).loss / samples


def _norms(
    copy: Network, gradients: dict[str, Array], case: TrainingCase, dataset: Dataset, step: int
) -> tuple[float, float]:
    """Squared norms of the mean gradients of the eighths of a global batch (their mean), and of the whole batch.

    The samples are drawn for this alone, so that they do not depend on the trained parameters.
    """
    chosen = rng.permutation(len(dataset.train_y), case.seed, step, purpose="gradient norms")[: case.global_batch]
    whole: dict[str, Array] = {name: np.zeros(value.shape) for name, value in gradients.items()}
    of_shares = []
    for part in np.array_split(chosen, _SHARES):
        x, labels = dataset.train_batch(part)
        copy.forward_backward(Batch(x=x, labels=labels, leaves=(0, len(part))), NoEvents())
        of_shares.append(sum(float(np.vdot(value, value)) for value in gradients.values()) / len(part) ** 2)
        for name, value in gradients.items():
            whole[name] += value
    big = sum(float(np.vdot(value, value)) for value in whole.values()) / len(chosen) ** 2
    return float(np.mean(of_shares)), big
