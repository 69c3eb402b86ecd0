"""Forward passes of a model in training: the spread of samples at every batch norm, and its statistics' divergence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim import codec, rng
from dpsim.errors import ConfigError
from dpsim.harness.quality.training import bound_copy, open_training
from dpsim.nn.layer import tree_sum
from dpsim.nn.network import NoEvents
from dpsim.predict.statistics_divergence import STATISTICS, Spread, rms_difference, spread
from dpsim.records.quality import DivergenceStudy, TrainingCase
from dpsim.replica import Array, Batch

Values = NDArray[np.float64]
Moments = dict[str, tuple[Values, Values]]


class Probe:
    """Forward passes of a model after some training, in which any number of samples is normalised together."""

    def __init__(self, study: DivergenceStudy) -> None:
        case = TrainingCase(
            model=study.model,
            dataset=study.dataset,
            global_batch=study.global_batch,
            local_batch=study.global_batch,
            batch_norm="global",
            learning_rate=study.learning_rate,
            momentum=study.momentum,
            seed=study.seed,
            steps=study.steps,
            compute_dtype=study.compute_dtype,
        )
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
    values = [codec.to_builtins(each) for each in spreads]
    means: dict[str, Any] = {name: float(np.mean([value[name] for value in values])) for name in values[0]}
    return Spread(**(means | {"rows": spreads[0].rows}))


def measured(
    study: DivergenceStudy, local_batches: Sequence[int], first: int
) -> dict[str, dict[str, dict[str, float]]]:
    """RMS divergence by local batch, batch norm and statistic, over global batches from number ``first`` on."""
    probe = Probe(study)
    squares: dict[str, dict[str, dict[str, list[float]]]] = {}
    for batch in probe.batches(first):
        of_all = _moments(probe.inputs(batch, study.global_batch))
        for b in local_batches:
            for name, (m, q) in _moments(probe.inputs(batch, b)).items():
                kept = squares.setdefault(str(b), {}).setdefault(name, {statistic: [] for statistic in STATISTICS})
                for statistic, value in rms_difference(m, q, *of_all[name], b).items():
                    kept[statistic].append(value)
    return {
        b: {name: {key: float(np.sqrt(np.mean(v))) for key, v in each.items()} for name, each in norms.items()}
        for b, norms in squares.items()
    }
