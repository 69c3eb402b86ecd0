"""Data-parallel training as one plain loop on one process: what the runtime must agree with."""

from __future__ import annotations

import numpy as np

from dpsim.data import Dataset, epoch_batches
from dpsim.plan import Sgd
from dpsim.replica import Array


def plain_training(
    initial: dict[str, Array], dataset: Dataset, global_batch: int, sgd: Sgd, steps: int, seed: int
) -> tuple[dict[str, Array], list[float]]:
    """Parameters and mean losses after some steps of an mlp of two dense layers, in float64 throughout."""
    w = {name: value.astype(np.float64) for name, value in initial.items()}
    velocity = {name: np.zeros_like(value) for name, value in w.items()}
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        for batch in epoch_batches(len(dataset.train_y), global_batch, seed, epoch):
            x = dataset.train_x[batch].reshape(len(batch), -1).astype(np.float64)
            labels = dataset.train_y[batch]
            hidden = np.maximum(x @ w["dense1.weight"] + w["dense1.bias"], 0.0)
            logits = hidden @ w["dense2.weight"] + w["dense2.bias"]
            logits -= logits.max(axis=1, keepdims=True)
            probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            losses.append(float(-np.log(probability[np.arange(len(batch)), labels]).mean()))
            slope = probability.copy()
            slope[np.arange(len(batch)), labels] -= 1.0
            back = (slope @ w["dense2.weight"].T) * (hidden > 0)
            gradient = {
                "dense1.weight": x.T @ back, "dense1.bias": back.sum(axis=0),
                "dense2.weight": hidden.T @ slope, "dense2.bias": slope.sum(axis=0),
            }  # fmt: skip
            for name in w:
                mean = gradient[name] / len(batch)
                velocity[name] = sgd.momentum * velocity[name] + mean + sgd.weight_decay * w[name]
                w[name] = w[name] - sgd.learning_rate * velocity[name]
            if len(losses) == steps:
                break
        epoch += 1
    return w, losses
