"""``ModuleTrainer``: dpsim's runtime trains a PyTorch module in a loop of one's own."""

from __future__ import annotations

from typing import Any

import torch

from dpsim.comm.clock import now
from dpsim.constraints import check
from dpsim.data import Dataset
from dpsim.errors import ConfigError
from dpsim.launch import rank_info
from dpsim.machine import Network
from dpsim.replica import Batch
from dpsim.runtime.micro_batches import own_leaves
from dpsim.runtime.trainer import Trainer
from dpsim.setting import plan_of
from dpsim.torch.module import TorchReplica
from dpsim.torch.module.replica import Loss


class ModuleTrainer:
    """A trainer of ``module`` on the ranks of this MPI job, a step at a time. Collective: every rank makes one.

    ``example`` is a batch (inputs [b, ...], labels [b, ...]) of the size that each rank will train on; it is not
    trained. ``loss`` is the sum over the samples (see ``TorchReplica``). ``plan`` takes the fields of ``dpsim.Plan``
    other than ``devices`` and ``global_batch``, as ``dpsim.fit`` does. The module's parameters are those that are
    trained, on every rank, so it can be evaluated and saved at any time; they begin as rank 0's.
    Raises ``ConfigError``.

    Start the script with ``mpiexec -n 2 python train.py`` or ``dpsim launch local --devices 2 train.py``.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        example: tuple[torch.Tensor, torch.Tensor],
        loss: Loss | None = None,
        *,
        network: str = "node",
        seed: int = 0,
        **plan: Any,
    ) -> None:
        x, labels = (tensor.numpy(force=True) for tensor in example)
        comm, parsed_network = rank_info.world(), Network.parse(network)
        row = {"devices": comm.size, "global_batch": comm.size * len(labels), **plan}
        complete = plan_of(row, parsed_network.default_algorithm)
        check("network", algorithm=complete.algorithm, network=parsed_network)
        dtype = None if example[0].is_floating_point() else x.dtype.name
        replica = TorchReplica(lambda: module, x.shape[1:], loss, input_dtype=dtype, label_shape=labels.shape[1:])
        samples = Dataset(name="of a loop", train_x=x, train_y=labels, test_x=x, test_y=labels, classes=0)
        self._trainer = Trainer(replica, samples, complete, comm, parsed_network, seed=seed)

    def step(self, x: torch.Tensor, labels: torch.Tensor) -> float:
        """Do one update from this rank's batch, and return the mean loss of its samples.

        Every rank calls it with as many samples. Raises ``ConfigError``, and ``NotFiniteError`` on every rank.
        """
        begin_s, trainer = now(), self._trainer
        plan, samples = trainer.plan, len(labels) * trainer.plan.devices
        edges = own_leaves(plan, trainer.rank, samples, plan.accumulate)
        if edges[-1] - edges[0] != len(labels):
            raise ConfigError(
                f"{len(labels)} samples on rank {trainer.rank} of {plan.devices}, with {plan.leaves} leaves",
                allowed="as many samples on every rank, of whole leaves",
                remedy="choose a batch size that the leaves of a rank divide",
            )
        share = Batch(
            x=x.numpy(force=True),
            labels=labels.numpy(force=True),
            leaves=tuple(edge - edges[0] for edge in edges),
            seed=trainer.seed,
            step=trainer.runner.steps,
            first_sample=edges[0],
        )
        return trainer.runner.run(share, samples, begin_s).sums.loss / max(len(labels), 1)

    def close(self) -> None:
        """Give back what the ranks share. Collective; the module keeps its parameters."""
        self._trainer.close()
