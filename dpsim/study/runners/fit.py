"""The fits of a study of quality: each trains alone, or measures the statistics of batch norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec, rng
from dpsim.data import Dataset, load_dataset
from dpsim.data.sharding import check_batch
from dpsim.dates import stamp
from dpsim.errors import ConfigError
from dpsim.machine import Network as Link
from dpsim.model.statistics_divergence import (
    STATISTICS,
    Spread,
    divergence,
    independent_rows,
    rms_difference,
    spread,
)
from dpsim.nn import build_model
from dpsim.nn.layer import tree_sum
from dpsim.nn.network import Network, NoEvents
from dpsim.records.quality import DivergencePoint, DivergenceStudy, Evaluation, TrainingCase, TrainingRun
from dpsim.replica import Array, Batch
from dpsim.runtime.trainer import Trainer
from dpsim.study.rows import rounded

Values = NDArray[np.float64]
Moments = dict[str, tuple[Values, Values]]
_SHARES = 8
"""Parts of a global batch whose gradients are compared with that of the whole."""
_EVALUATE_EVERY = 0.03
"""The training set is evaluated each time the steps have grown by this share: the target's step is interpolated."""


def open_training(case: TrainingCase) -> tuple[Trainer, Network]:
    """A trainer of the case on this rank alone, and its replica. Raises ``ConfigError``."""
    dataset = load_dataset(case.dataset, case.seed)
    check_batch(len(dataset.train_y), case.global_batch)
    replica = build_model(case.model, dataset.input_shape, dataset.classes)
    return Trainer(replica, dataset, case.plan, MPI.COMM_SELF, Link.parse("node"), seed=case.seed), replica


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
            loss, small, big = rounded((loss, small, big))
            evaluations.append(Evaluation(step=step, loss=loss, small_norm=small, big_norm=big))
            if loss <= case.target_loss:
                break
    test, every = trainer.evaluate(), trainer.steps_per_epoch
    run = TrainingRun(
        case=case,
        measured_at=stamp(),
        loss_every=every,
        losses=rounded(_epoch_losses(sums, every)),
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


class Probe:
    """Forward passes of a model after some training, in which any number of samples is normalised together."""

    def __init__(self, study: DivergenceStudy) -> None:
        case = study.case(local_batch=study.global_batch, batch_norm="global")
        trainer, _ = open_training(case)
        for _ in range(study.steps):
            trainer.step()
        trainer.close()
        self._study, self._dataset = study, trainer.dataset
        self._replica, _ = bound_copy(case, trainer)
        self._replica.normalise_batches("leaf", tree_sum)
        self.norms = {layer.name for layer in self._replica.layers if layer.batch_norm_channels}
        if not self.norms:
            raise ConfigError(
                f"model {study.model!r} has no batch norm", allowed="a model with batch norm, such as cnn or resnet20"
            )
        self._inputs: dict[str, Array] = {}
        self._replica.observe(self._keep)

    def _keep(self, operation: str, layer: str, before: Array, after: Array) -> None:
        if operation == "forward" and layer in self.norms:
            self._inputs[layer] = before.copy()

    def batches(self, first: int) -> Iterator[tuple[Array, NDArray[np.int64]]]:
        """Global batches of the training set, drawn at random for this alone; others for another ``first``."""
        for number in range(first, first + self._study.batches):
            order = rng.permutation(len(self._dataset.train_y), self._study.seed, number, purpose="divergence")
            yield self._dataset.train_batch(order[: self._study.global_batch])

    def inputs(self, batch: tuple[Array, NDArray[np.int64]], normalised_together: int) -> dict[str, Array]:
        """The input of every batch norm, [N, rows, C]."""
        x, labels = batch
        leaves = tuple(range(0, len(x) + 1, normalised_together))
        self._replica.forward_backward(Batch(x=x, labels=labels, leaves=leaves), NoEvents())
        return {
            name: value.astype(np.float64).reshape(len(x), -1, value.shape[-1]) for name, value in self._inputs.items()
        }


def _moments(inputs: Mapping[str, Array]) -> Moments:
    """Means and mean squares of every sample, [N, C]."""
    return {name: (x.mean(axis=1), (x * x).mean(axis=1)) for name, x in inputs.items()}


def predicted(study: DivergenceStudy) -> tuple[DivergencePoint, ...]:
    """Return the predicted divergence at every local batch, norm and statistic.

    The spread is that of a pass in which all samples were normalised together. With local statistics in the norms
    before it, a norm's samples spread less: the prediction is scaled by what was measured over what is predicted at one
    small local batch.
    """
    spreads = of_samples(study)
    (scales,) = measured(study, (study.scaled_at,), 0)
    points = []
    for b in study.local_batches:
        for name, each in spreads.items():
            unscaled, null = (f(each, b, study.global_batch) for f in (divergence, independent_rows))
            at_scale = divergence(each, study.scaled_at, study.global_batch)
            for statistic in STATISTICS:
                scale = scales[name][statistic] / at_scale[statistic] if at_scale[statistic] > 0 else 1.0
                points.append(
                    DivergencePoint(
                        layer=name,
                        statistic=statistic,
                        local_batch=b,
                        predicted=scale * unscaled[statistic],
                        unscaled=unscaled[statistic],
                        independent_rows=null[statistic],
                    )
                )
    return tuple(points)


def of_samples(study: DivergenceStudy) -> dict[str, Spread]:
    """The spread of samples at every batch norm: the mean over some global batches, from one forward pass of each."""
    probe = Probe(study)
    spreads: dict[str, list[Spread]] = defaultdict(list)
    for batch in probe.batches(0):
        inputs = probe.inputs(batch, study.global_batch)
        for name, (m_NC, q_NC) in _moments(inputs).items():
            x = inputs[name]
            fourth = ((x - m_NC.mean(axis=0)) ** 4).mean(axis=(0, 1))
            spreads[name].append(spread(m_NC, q_NC, fourth, x.shape[1]))
    return {name: _mean(each) for name, each in spreads.items()}


def _mean(spreads: Sequence[Spread]) -> Spread:
    means: dict[str, Any] = {
        name: float(np.mean([getattr(each, name) for each in spreads])) for name in Spread.__struct_fields__
    }
    return Spread(**means | {"rows": spreads[0].rows})


def measured(study: DivergenceStudy, local_batches: Sequence[int], first: int) -> list[dict[str, dict[str, float]]]:
    """Return, at each local batch, the RMS divergence by batch norm and statistic.

    It is taken over global batches from number ``first`` on.
    """
    probe = Probe(study)
    squares: list[dict[str, dict[str, list[float]]]] = [{} for _ in local_batches]
    for batch in probe.batches(first):
        of_all = _moments(probe.inputs(batch, study.global_batch))
        for b, norms in zip(local_batches, squares, strict=True):
            for name, (m, q) in _moments(probe.inputs(batch, b)).items():
                for statistic, value in rms_difference(m, q, *of_all[name], b).items():
                    norms.setdefault(name, {}).setdefault(statistic, []).append(value)
    return [
        {name: {key: float(np.sqrt(np.mean(v))) for key, v in each.items()} for name, each in norms.items()}
        for norms in squares
    ]


def train_into(task: tuple[TrainingCase, Path]) -> None:
    """Train a case, and save its run to the file as soon as it is finished."""
    case, file = task
    codec.write(file, train(case))


def measured_values(study: DivergenceStudy) -> tuple[float, ...]:
    """Return what is measured at the points of ``predicted``, over other global batches than those it rests on."""
    by_batch = measured(study, study.local_batches, study.batches)
    return tuple(value for norms in by_batch for each in norms.values() for value in each.values())
