"""dpsim: data-parallel training, predicted and measured in the same run.

``import dpsim`` alone loads next to nothing: a name in ``__all__`` is loaded when it is first used.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpsim.installation import VERSION, other_program, without_other_program

if TYPE_CHECKING:  # for type checkers and editors, which cannot read _HOMES; a test holds the two lists together
    from dpsim.api import fit as fit
    from dpsim.data import Dataset as Dataset
    from dpsim.data import load_dataset as load_dataset
    from dpsim.entry import predict as predict
    from dpsim.entry import read_machine as read_machine
    from dpsim.entry import read_workload as read_workload
    from dpsim.entry import sweep as sweep
    from dpsim.harness.load import load as load
    from dpsim.launch.rank_info import local_rank as local_rank
    from dpsim.launch.rank_info import local_size as local_size
    from dpsim.launch.rank_info import rank as rank
    from dpsim.launch.rank_info import size as size
    from dpsim.nn import FunctionReplica as FunctionReplica
    from dpsim.nn import build_model as build_model
    from dpsim.optimizer import AdamW as AdamW
    from dpsim.optimizer import Lars as Lars
    from dpsim.optimizer import Sgd as Sgd
    from dpsim.plan import Plan as Plan
    from dpsim.records.sweep import Experiment as Experiment
    from dpsim.records.train import TrainResult as TrainResult
    from dpsim.replica import Batch as Batch
    from dpsim.replica import BatchSums as BatchSums
    from dpsim.replica import LayerSpec as LayerSpec
    from dpsim.replica import Replica as Replica
    from dpsim.replica import StepEvents as StepEvents
    from dpsim.runtime.checkpoints import Checkpoints as Checkpoints
    from dpsim.runtime.fit import Callback as Callback
    from dpsim.runtime.fit import Epoch as Epoch
    from dpsim.runtime.fit import OnRank as OnRank
    from dpsim.runtime.trainer import Trainer as Trainer
    from dpsim.setting import Grid as Grid
    from dpsim.setting import Setting as Setting
    from dpsim.workload import Tensor as Tensor

__version__ = VERSION
if _OTHER := other_program():
    warnings.warn(f"{_OTHER} is another program, in the same folder; to do: {without_other_program()}", stacklevel=2)

_HOMES = {
    "dpsim.api": ("fit",),
    "dpsim.data": ("Dataset", "load_dataset"),
    "dpsim.entry": ("predict", "read_machine", "read_workload", "sweep"),
    "dpsim.harness.load": ("load",),
    "dpsim.launch.rank_info": ("local_rank", "local_size", "rank", "size"),
    "dpsim.nn": ("FunctionReplica", "build_model"),
    "dpsim.optimizer": ("AdamW", "Lars", "Sgd"),
    "dpsim.plan": ("Plan",),
    "dpsim.records.sweep": ("Experiment",),
    "dpsim.records.train": ("TrainResult",),
    "dpsim.replica": ("Batch", "BatchSums", "LayerSpec", "Replica", "StepEvents"),
    "dpsim.runtime.checkpoints": ("Checkpoints",),
    "dpsim.runtime.fit": ("Callback", "Epoch", "OnRank"),
    "dpsim.runtime.trainer": ("Trainer",),
    "dpsim.setting": ("Grid", "Setting"),
    "dpsim.workload": ("Tensor",),
}
_MODULES = ("fusion_rules", "machine", "model", "workload")
"""Modules that the documentation uses without importing them, as in ``dpsim.model.predict_points``."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"dpsim.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dpsim' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
