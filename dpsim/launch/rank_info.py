"""Which rank this process is, and of how many: started by dpsim, by ``mpiexec`` or ``srun``, or alone (rank 0 of 1).

MPI is loaded only where the launcher's environment variables do not answer the question.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from dpsim import installation
from dpsim.errors import CommunicationError
from dpsim.launch import scratch_keeper

if TYPE_CHECKING:
    from mpi4py import MPI

_LAST_ORDINARY_STEP = 0xFFFF_FFF0  # step numbers from here on are Slurm's own (batch script, interactive shell)

stall_after_s = 60.0
"""After how long a wait ``dpsim.fit`` reports a stall where the script does not say; ``dpsim launch`` may set it."""


class MpiJob(NamedTuple):
    """The MPI job that this process was started in; ``size`` is None where the launcher does not state it."""

    launcher: str
    rank: int
    size: int | None


def _number(environment: Mapping[str, str], key: str) -> int | None:
    text = environment.get(key, "")
    return int(text) if text.isdecimal() else None


def job(environment: Mapping[str, str] = os.environ) -> MpiJob | None:
    """Return the MPI job that this process is a rank of, by its launcher's environment variables; None outside one.

    None too where ``python -m mpi4py.futures`` has made the other ranks workers of an executor.
    """
    if "mpi4py.futures" in sys.modules:
        return None
    number = functools.partial(_number, environment)
    for rank_key, size_key in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if (rank := number(rank_key)) is not None:
            return MpiJob("mpiexec", rank, number(size_key))
    rank, step, tasks = number("SLURM_PROCID"), number("SLURM_STEP_ID"), number("SLURM_STEP_NUM_TASKS")
    if rank is not None and step is not None and step < _LAST_ORDINARY_STEP and (tasks or 0) > 1:
        return MpiJob("srun", rank, tasks)
    if (rank := number("PMIX_RANK")) is not None:
        return MpiJob("a PMIx launcher", rank, None)
    return None


@functools.cache
def world() -> MPI.Intracomm:
    """Return MPI's world communicator; the first call starts MPI and is collective.

    Once all ranks have started it, a job that is killed leaves nothing in /dev/shm. Raises ``CommunicationError`` when
    no MPI library can be loaded.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicationError(
            f"mpi4py cannot load an MPI library: {error}",
            remedy=f"install one into this Python: {installation.install('mpich')}",
        ) from error
    MPI.COMM_WORLD.Barrier()
    scratch_keeper.unlink(scratch_keeper.shared_files())
    return MPI.COMM_WORLD


def loaded_world() -> MPI.Intracomm | None:
    """Return MPI's world communicator if this process has started MPI; None otherwise. Starts nothing."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized():
        return None
    communicator: MPI.Intracomm = module.COMM_WORLD
    return communicator


def rank() -> int:
    """Return this process's number among all ranks, from 0."""
    return _rank_and_size()[0]


def size() -> int:
    """Return the number of ranks."""
    return _rank_and_size()[1]


def local_rank() -> int:
    """Return this process's number among the ranks of its node, from 0.

    Where the launcher does not state it (``srun``), the first call of ``local_rank`` or ``local_size`` is collective.
    """
    return _local_rank_and_size()[0]


def local_size() -> int:
    """Return the number of ranks on this node; collective where ``local_rank`` is."""
    return _local_rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    if "mpi4py.MPI" not in sys.modules:
        current = job()
        if current is None:
            return 0, 1
        if current.size is not None:
            return current.rank, current.size
    return world().rank, world().size


def _local_rank_and_size() -> tuple[int, int]:
    for rank_key, size_key in (
        ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ):
        rank, size_on_node = _number(os.environ, rank_key), _number(os.environ, size_key)
        if rank is not None and size_on_node is not None:
            return rank, size_on_node
    return (0, 1) if size() == 1 else _node_rank_and_size()


@functools.cache
def _node_rank_and_size() -> tuple[int, int]:
    from mpi4py import MPI

    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank_and_size = node.rank, node.size
    node.Free()
    return rank_and_size
