"""Neural networks on a small set of array operations: layers, loss, optimizer, and the built-in models."""

from dpsim.nn.function import FunctionReplica
from dpsim.nn.models import build_model
from dpsim.nn.network import Network
from dpsim.nn.optimizer import update
from dpsim.nn.tokens import MODELS

__all__ = ["MODELS", "FunctionReplica", "Network", "build_model", "update"]
