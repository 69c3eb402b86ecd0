"""Neural networks on a small set of array operations: layers, loss, optimizer, and the built-in models."""

from dpsim.nn.finite import first_nonfinite_layer
from dpsim.nn.models import MODELS, build_model
from dpsim.nn.network import Network
from dpsim.nn.optimizer import update

__all__ = ["MODELS", "Network", "build_model", "first_nonfinite_layer", "update"]
