"""Data-parallel training as one plain loop on one process: what the runtime must agree with."""

from __future__ import annotations

import numpy as np

from dpsim.data import Dataset, epoch_batches
from dpsim.optimizer import Lars, Optimizer, Sgd
from dpsim.replica import Array


def plain_training(
    initial: dict[str, Array], dataset: Dataset, global_batch: int, optimizer: Optimizer, rates: list[float], seed: int
) -> tuple[dict[str, Array], list[float]]:
    """Parameters and mean losses after a step at each of ``rates``, of an mlp of two dense layers, in float64."""
    w = {name: value.astype(np.float64) for name, value in initial.items()}
    first, second = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    losses: list[float] = []
    epoch = 0
    while len(losses) < len(rates):
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
                "dense1.weight": x.T @ back,
                "dense1.bias": back.sum(axis=0),
                "dense2.weight": hidden.T @ slope,
                "dense2.bias": slope.sum(axis=0),
            }
            t = len(losses)
            for name in w:
                rate = rates[t - 1]
                mean = gradient[name] / len(batch)
                if isinstance(optimizer, Sgd):
                    mean = mean + optimizer.weight_decay * w[name]
                    first[name] = optimizer.momentum * first[name] + mean
                    move = mean + optimizer.momentum * first[name] if optimizer.nesterov else first[name]
                elif isinstance(optimizer, Lars):
                    trust, decay = 1.0, 0.0
                    if w[name].ndim > 1:
                        decay, of_w, of_g = optimizer.weight_decay, np.linalg.norm(w[name]), np.linalg.norm(mean)
                        if of_w > 0 and of_g > 0:
                            trust = float(optimizer.trust_coefficient * of_w / (of_g + decay * of_w))
                    first[name] = optimizer.momentum * first[name] + rate * trust * (mean + decay * w[name])
                    move, rate = first[name], 1.0
                else:
                    first[name] = optimizer.beta1 * first[name] + (1 - optimizer.beta1) * mean
                    second[name] = optimizer.beta2 * second[name] + (1 - optimizer.beta2) * mean**2
                    root = np.sqrt(second[name] / (1 - optimizer.beta2**t))
                    move = first[name] / (1 - optimizer.beta1**t) / (root + optimizer.epsilon)
                    move = move + optimizer.weight_decay * w[name]
                w[name] = w[name] - rate * move
            if len(losses) == len(rates):
                break
        epoch += 1
    return w, losses
