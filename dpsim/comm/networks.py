"""Opens the transport of a network: MPI, a link in user space, or GPUs."""

from __future__ import annotations

from mpi4py import MPI

from dpsim.algorithms import Backend
from dpsim.comm.mpi import MpiTransport
from dpsim.comm.paced import PacedTransport
from dpsim.comm.transport import Transport
from dpsim.errors import ConfigError
from dpsim.machine import Network, Selection


def transport(
    comm: MPI.Intracomm,
    network: Network,
    devices_a_node: int = 1,
    selection: Selection | None = None,
    backend: Backend = "cpu",
    *,
    sleeps: bool = False,
    on_device: bool = False,
    algorithm: str = "auto",
    world: Transport | None = None,
) -> Transport:
    """Return the transport of a network over an MPI communicator (which it duplicates, so that tags never mix).

    With ``sleeps`` ranks that wait for messages of an emulated network sleep. With ``on_device`` what backend cuda
    allocates is in the memory of the ranks' GPUs, for gradients that are computed there; its ``algorithm`` decides
    whether NCCL adds them up. ``world`` is a transport of the same rank over more ranks, all of which work at the same
    time (as those of all stages of a pipeline do): the two share the rank's emulated link, and where not every one of
    all these ranks has a core, waiting ranks leave theirs to the others. Raises ``ConfigError`` where the ranks do not
    fill whole nodes.
    """
    if comm.size % devices_a_node:
        raise ConfigError(f"{comm.size} ranks on nodes of {devices_a_node} devices", allowed="full nodes")
    if backend == "cuda":
        from dpsim.comm.cuda.transport import CudaTransport  # loads CUDA

        return CudaTransport(comm.Dup(), devices_a_node, on_device=on_device, algorithm=algorithm)
    if network.paced:
        return PacedTransport(comm.Dup(), network, devices_a_node, sleeps=sleeps, world=world)
    return MpiTransport(comm.Dup(), devices_a_node, selection, world, network, sleeps=sleeps)
