"""What a replica multiplies in, as its plan says."""

from __future__ import annotations

from dpsim.compute_dtype import ComputeDtype
from dpsim.errors import ConfigError
from dpsim.replica import EmulatedCompute, Replica, RoundingReplica


def choose_compute_dtype(replica: Replica, dtype: ComputeDtype) -> None:
    """Let a replica multiply in this dtype. Raises ``ConfigError`` if it cannot.

    One that waits instead of computing waits for as long as was profiled, whatever the dtype.
    """
    if isinstance(replica, RoundingReplica):
        replica.multiply_in(dtype)
    elif dtype != "float32" and not isinstance(replica, EmulatedCompute):
        raise ConfigError(
            f"compute dtype {dtype} for a model of your own, which computes as it is written",
            allowed="float32 with it",
            remedy="leave --compute-dtype out, and round the operands in the model, or use a built-in model",
        )
