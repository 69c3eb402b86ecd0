"""What a workload says of a replica's memory is what the replica allocates, at any batch."""

from __future__ import annotations

import numpy as np
import pytest

from dpsim.nn import build_model
from dpsim.nn.network import NoEvents
from dpsim.replica import Batch
from dpsim.runtime.describe import describe, with_work_bytes


@pytest.mark.parametrize("samples", [1, 7, 64])
@pytest.mark.parametrize("token", ["mlp:64x20", "mlp:64x3,dropout=0.1,norm=layer", "cnn", "cnn:8,8,crop=1", "resnet20"])
def test_the_bytes_that_layers_work_in_are_those_allocated(token: str, samples: int) -> None:
    replica = build_model(token, (8, 8, 1), 10)
    workload = with_work_bytes(describe(replica, token), replica)
    assert replica.work_bytes == 0
    parameters = replica.initial_parameters(0)
    replica.bind(parameters, {name: np.zeros_like(value) for name, value in parameters.items()})
    x, labels = np.zeros((samples, 8, 8, 1), np.float32), np.zeros(samples, np.int64)
    replica.forward_backward(Batch(x=x, labels=labels, leaves=(0, samples)), NoEvents())
    expected = sum(layer.work_bytes + samples * layer.work_bytes_per_sample for layer in workload.layers)
    assert expected == replica.work_bytes
