"""The computation under which communication is measured: a model's own forward and backward, or a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now
from dpsim.data import load_dataset
from dpsim.dtypes import ComputeDtype
from dpsim.machine import Network
from dpsim.plan import Plan
from dpsim.replica import Replica
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.workload import Workload

_UNIT_S = 100e-6


class Load(Protocol):
    """Work in units of about ``unit_s`` seconds, on the calling thread."""

    unit_s: float

    def run(self, units: int, poll: Callable[[], None]) -> float:
        """Seconds that ``units`` units take. ``poll`` is called wherever a training step would poll communication."""


class StandIn:
    """Units of a matrix product and an elementwise pass, about 100 us each."""

    def __init__(self) -> None:
        self._a = np.ones((128, 128), np.float32)
        self._b = np.ones((128, 128), np.float32)
        self._c = np.empty((128, 128), np.float32)
        start_s = now()
        self._unit(50)
        product_s = (now() - start_s) / 50
        self._products = max(1, round(_UNIT_S / product_s))
        self.unit_s = self._products * product_s

    def _unit(self, products: int) -> None:
        for _ in range(products):
            np.matmul(self._a, self._b, out=self._c)
            np.maximum(self._c, 0.0, out=self._c)

    def run(self, units: int, poll: Callable[[], None]) -> float:
        start_s = now()
        for _ in range(units):
            self._unit(self._products)
            poll()
        return now() - start_s


class ReplicaLoad:
    """Forward and backward of a model over one local batch, repeated; no parameter is updated.

    With a ``workload`` it waits for as long as the model computes.
    """

    def __init__(
        self,
        model: str,
        dataset: str,
        local_batch: int,
        workload: Workload | None = None,
        compute_dtype: ComputeDtype = "float32",
    ) -> None:
        data = load_dataset(dataset)
        self._replica: Replica = models.load(model, data.input_shape, data.classes).replica()
        if workload is not None:
            steady = msgspec.structs.replace(workload, step_spread=())
            self._replica = EmulatedReplica(self._replica, steady, seed=0, rank=MPI.COMM_WORLD.rank)
        plan = Plan(devices=1, global_batch=local_batch, fusion_rule="one", compute_dtype=compute_dtype)
        trainer = Trainer(self._replica, data, plan, MPI.COMM_SELF, Network())
        self._share, _ = trainer.next_share()
        self._poll: Callable[[], None] = nothing
        self.run(2, nothing)
        self.unit_s = self.run(3, nothing) / 3

    def run(self, units: int, poll: Callable[[], None]) -> float:
        self._poll = poll
        if isinstance(self._replica, EmulatedReplica):
            self._replica.begin_anew()
        start_s = now()
        for _ in range(units):
            self._replica.forward_backward(self._share, self)
        return now() - start_s

    def forward_done(self, layer: int) -> None:
        self._poll()

    def loss_done(self) -> None:
        pass

    def gradients_ready(self, layer: int) -> None:
        self._poll()

    def backward_done(self, layer: int) -> None:
        self._poll()


def nothing() -> None:
    pass
