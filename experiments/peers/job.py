"""One system's ranks as a job that lives through all rounds and sleeps while it is not asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dpsim import codec
from dpsim.experiments.peers.setting import Work
from dpsim.launch import resident_job

_TASK = "dpsim.experiments.peers.ranks:serve_on_ranks"


class Job(resident_job.Job):
    """Ranks of ``system`` that do ``work``, each listening on its own socket. ``folder`` must be a new one."""

    def __init__(self, system: str, work: Work, folder: Path, environment: Mapping[str, str], *, pin: bool) -> None:
        def start(address: str) -> resident_job.OnRanks:
            argument = {"system": system, "work": codec.to_builtins(work), "socket": address, "folder": str(folder)}
            return resident_job.OnRanks(_TASK, argument, devices=work.devices, env=environment, pin=pin)

        super().__init__(system, work.devices, folder, start)
