"""Tasks of the tests of CUDA in the runtime; the ranks run in numba's CUDA simulator."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI
from quick_simulator import short_turns
from ranks_runtime import open_trainer

from dpsim.comm.allreduce import allreduce
from dpsim.comm.compression import Compression
from dpsim.comm.cuda import transport as transport_module
from dpsim.comm.cuda.available import open_device, simulating
from dpsim.comm.cuda.device import PeerMemory
from dpsim.comm.cuda.paths import Path
from dpsim.comm.cuda.peer_access import PeerAccess, find_access, writes_arrive
from dpsim.comm.cuda.transport import CudaTransport
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.transport import Array, CollectiveSteps, SteppedAllreduce, aligned_bytes
from dpsim.kernels.allreduce import reference, tree
from dpsim.progress import Progress
from dpsim.runtime import trainer as trainer_module


class TreeTransport(MpiTransport):
    """Sums by the reference, in the fixed order, of what every rank has sent to all."""

    def allocate(self, size_bytes: int) -> Array:
        return aligned_bytes(size_bytes)

    def prepare(
        self, data: Array, algorithm: str, compression: Compression | None, order: object = None, *others: object
    ) -> SteppedAllreduce:
        def rounds() -> CollectiveSteps:
            data[...] = reference.allreduce(self.comm.allgather(data.copy()), tree.slots(range(self.size + 1)))
            yield from ()

        return SteppedAllreduce(self, rounds)


class Nobody:
    """What no replica is: in place of ``DeviceReplica`` all compute on the host, and the bits are the CPU's."""


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All that the tests ask of ranks, in one job: see the functions below."""
    with short_turns() if simulating() else contextlib.nullcontext():
        return {
            "trained": [trained(comm, case, argument["steps"]) for case in argument["cases"]],
            "reached": reached(comm),
            "moved": moved(comm),
        }


def trained(comm: MPI.Intracomm, case: dict[str, Any], steps: int) -> dict[str, Any]:
    """A case trained for some steps by each transport that it names: digests, losses, and how it was reduced.

    ``flags`` is ``cuda`` with kernels that wait inside, for ranks that are processes can do so in the simulator too.
    """
    ran: dict[str, Any] = {}
    for name in case["transports"]:
        with contextlib.ExitStack() as stack:
            if name == "tree":
                tree_transport = TreeTransport(comm.Dup())
                stack.enter_context(mock.patch.object(trainer_module, "transport", lambda *_, **__: tree_transport))  # noqa: B023
            if name == "flags":
                access = PeerAccess(mapping=open_device(comm.rank).mappings[0], mode="flags")
                path = Path(name="peer memory", access=access)
                stack.enter_context(mock.patch.object(transport_module, "find_path", lambda *_: path))  # noqa: B023
            backend = "cuda" if name in ("cuda", "flags") else "cpu"
            stack.enter_context(mock.patch("dpsim.replica.DeviceReplica", Nobody))
            trainer = open_trainer(comm, case | {"backend": backend})
        losses = [trainer.step().sums.loss for _ in range(steps)]
        test = trainer.evaluate()
        launches = trainer.transport.peer_allreduce if isinstance(trainer.transport, CudaTransport) else None
        stages = sorted({len(launch.stages) for launch in (launches.bound if launches is not None else ())})
        trainer.close()
        ran[name] = {
            "digests": comm.allgather(trainer.digest()),
            "losses": comm.allgather(losses),
            "test": test.loss,
            "stages": stages,
        }
    return ran


def reached(comm: MPI.Intracomm) -> dict[str, Any]:
    """What the ranks find of each other's memory, and what they would find if a rank's writes did not arrive."""
    device = open_device(comm.rank)
    access = find_access(device, comm)
    memory = device.share(comm, 1000, access.mapping)
    assert memory is not None
    own = memory.ranks[comm.rank]
    own[:] = comm.rank + 1
    device.settle()
    comm.Barrier()
    seen = [sorted(set(array.tolist())) for array in memory.ranks]
    lost = PeerMemory(
        ranks=tuple(own if rank == comm.rank else device.memory(len(own)) for rank in range(comm.size)),
        mapping=access.mapping,
        close=memory.close,
    )
    comm.Barrier()
    arrive = writes_arrive(device, comm, memory)
    comm.Barrier()
    own[:] = 0
    device.settle()
    actual = {
        "way": access.mapping,
        "mode": access.mode,
        "seen": comm.allgather(seen),
        "sizes": [len(a) for a in memory.ranks],
        "arrive": comm.allgather(arrive),
        "arrive_if_lost": comm.allgather(writes_arrive(device, comm, lost)),
    }
    memory.close()
    return actual


def moved(comm: MPI.Intracomm) -> dict[str, Any]:
    """What is in memory of the transport's own is reduced there; what is not travels by messages."""
    transport = CudaTransport(comm.Dup())
    memory = transport.allocate(4000)
    data, elsewhere = memory.view(np.float32), np.full(7, comm.rank, np.float32)
    right = []
    for step, (low, high) in enumerate(((0, 1000), (16, 17), (3, 998), (0, 1000))):
        before = np.arange(1000, dtype=np.float32) * (comm.rank + step)
        data[...] = before
        allreduce(transport, data[low:high], "direct")
        factor = sum(rank + step for rank in range(comm.size))
        expected = before.copy()
        expected[low:high] = np.arange(1000, dtype=np.float32)[low:high] * factor
        right.append(bool((data == expected).all()))
    allreduce(transport, elsewhere, "ring")
    actual = {
        "right": all(all(steps) for steps in comm.allgather(right)),
        "elsewhere": elsewhere.tolist(),
        "launches": len(transport.peer_allreduce.bound) if transport.peer_allreduce is not None else 0,
        "aligned": memory.ctypes.data % 64,
    }
    transport.close()
    transport.close()
    return actual
