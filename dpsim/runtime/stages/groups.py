"""Who talks to whom where ranks compute different layers or parts of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpi4py import MPI

from dpsim.comm.group import class_group
from dpsim.comm.networks import transport
from dpsim.comm.ordered_sum import kept_sum
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import Network
from dpsim.replica import OrderedSum, StagedReplica
from dpsim.runtime.program import StepProgram
from dpsim.schedule import Schedule
from dpsim.strategy import own_blocks


@dataclass(frozen=True)
class StageGroups:
    """The ranks of a schedule with several rank classes.

    ``alike`` are those of this rank's class, which compute the same layers of other samples. ``world`` carries messages
    among all ranks, and, where stages have parts, ``parts`` among those that compute the same samples.
    """

    alike: MPI.Intracomm
    world: Transport
    parts: Transport | None

    @classmethod
    def of(cls, schedule: Schedule, comm: MPI.Intracomm, network: Network, *, sleeps: bool) -> StageGroups | None:
        """Open this rank's groups; return ``None`` if all ranks compute the same layers. Collective over ``comm``."""
        if schedule.classes == 1:
            return None
        plan, parts = schedule.plan, None
        alike = class_group(comm, schedule.class_of(comm.rank))
        world = transport(comm, network, plan.devices_a_node, sleeps=sleeps)
        if plan.parallelism.parts > 1:
            neighbours = class_group(comm, comm.rank // plan.parallelism.parts)
            of_a_node = plan.joining.layout.of_a_node
            parts = transport(neighbours, network, of_a_node, sleeps=sleeps, world=world)
        return cls(alike, world, parts)

    def give_layers(
        self,
        replica: StagedReplica,
        schedule: Schedule,
        program: StepProgram,
        pause: Callable[[OrderedSum, Sequence[Array]], Array],
    ) -> None:
        """Tell a replica which layers are its own, before anything is bound.

        ``pause`` calls a sum over column blocks, for which computation waits.
        """
        recompute = any(operation >= 0 for row in program.recompute for operation in row)
        in_flight = schedule.stashes[schedule.class_of(self.world.rank)]
        replica.take_layers(program.layers, in_flight, recompute, self._sum_of_blocks(schedule, pause))

    def _sum_of_blocks(
        self, schedule: Schedule, pause: Callable[[OrderedSum, Sequence[Array]], Array]
    ) -> OrderedSum | None:
        if self.parts is None:
            return None
        blocks = schedule.workload.column_blocks
        firsts = [own_blocks(blocks, part, self.parts.size).start for part in range(self.parts.size)]
        add = kept_sum(self.parts, slots([*firsts, blocks]), schedule.plan.joining.algorithm)
        return lambda arrays: pause(add, arrays)

    def close(self) -> None:
        """Give back what the transport of all ranks holds."""
        self.world.close()
