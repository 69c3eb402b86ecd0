"""Tasks of the tests of reproducible training: what runs come to, on the ranks of a job."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from ranks_runtime import open_trainer

from dpsim import codec
from dpsim.progress import Progress
from dpsim.runtime.fit import fit


def results(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Every case trained and tested: its result without times, and each rank's own digest and test sums."""
    actual = []
    for case in argument["cases"]:
        report(case["name"])
        trainer = open_trainer(comm, case)
        result = fit(trainer, argument["steps"])
        ranks = comm.allgather((trainer.digest(), codec.to_builtins(trainer.evaluate())))
        assert all(rank == ranks[0] for rank in ranks)
        digest, test = ranks[0]
        assert digest == result.digest
        actual.append({"digest": digest, "losses": list(result.losses), "test": test})
    return actual
