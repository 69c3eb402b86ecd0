"""The process that starts a script, lets it write a checkpoint, and starts it again on another number. Loads torch.

``start.py`` calls it with a folder, in which it reads a request and writes what each rank of both starts held. Both
are in one protected process, so that the second start sees what the first one wrote, and nobody else does.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import distributed
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from dpsim.errors import ConfigError
from dpsim.launch.user_program import run_as_main
from dpsim.torch.script.probe.around import Script
from dpsim.torch.script.probe.endings import EnoughSteps, Refused, end_process, second_model
from dpsim.torch.script.probe.fsdp import ShardedModel, watch
from dpsim.torch.script.probe.process_group import replace_everywhere
from dpsim.torch.script.probe.reproduce import loaders as data_loaders
from dpsim.torch.script.probe.reproduce.epochs import Epochs
from dpsim.torch.script.probe.reproduce.models import Given, InReplicas, InShards, content, digest, hashed, whole
from dpsim.torch.script.probe.reproduce.ranks import awaited, become, died, forked, parts
from dpsim.torch.script.probe.reproduce.report import REPORT, REQUEST
from dpsim.torch.script.probe.reproduce.state import TrainingState

_OTHER_SEEDS = 1000
"""Added to the ranks by which what no script seeds is seeded in the second start: processes begin with others."""


class ResumeObserver(Script):
    """Notes what the steps of a rank hold, and which of them is the first after the checkpoint that is asked for.

    The script ends ``steps`` steps after that, or, where it has resumed, after its beginning.
    """

    def __init__(self, epochs: Epochs, request: Any, *, resumed: bool) -> None:
        super().__init__()
        self._epochs, self._wanted, self._most, self._resumed = epochs, request.steps, request.most_steps, resumed
        self._checkpoints_left = request.checkpoint
        self._state = TrainingState()
        self._schedulers: list[Any] = []
        self._scalers: list[Any] = []
        self._saved = False
        self._stepped = True
        self._group: Any = None
        self.steps: list[dict[str, Any]] = []
        """Of each step its batches, the random state that it begins with, and whether it draws from it."""
        self.snapshots: dict[str, Any] = {}
        """Of the first step, and of the first one after the checkpoint."""
        self.checkpoint: int | None = None
        """The number of steps before the checkpoint."""

    def __deepcopy__(self, _: Any) -> ResumeObserver:
        """Return itself, for a script that copies its model copies hooks too."""
        return self

    def install(self) -> None:
        """Put itself around what the script calls."""
        self.listen_to_construction(None)
        self.wrap(torch.autograd, "backward", super().backward)
        self.wrap(Optimizer, "__init__", self._noting(self._state.note))
        self.wrap(LRScheduler, "__init__", self._noting(self._schedulers.append))
        self.wrap(torch.amp.GradScaler, "__init__", self._noting(self._scalers.append))
        watch(self._sharded, done="compared")
        register_optimizer_step_post_hook(self._noted_update)
        replace_everywhere(torch.save, self._saving(torch.save))

    def _noting(self, note: Callable[[Any], None]) -> Callable[..., None]:
        def noted(make: Any, made: Any, /, *arguments: Any, **keywords: Any) -> None:
            make(made, *arguments, **keywords)
            note(made)

        return noted

    def _saving(self, save: Any) -> Any:
        def saved(value: Any, file: Any, *arguments: Any, **keywords: Any) -> Any:
            if self.checkpoint is not None and not self._resumed:
                raise EnoughSteps  # the next one would replace the one that the second start is to find
            result = save(value, file, *arguments, **keywords)
            self._saved = self._saved or isinstance(file, (str, os.PathLike)) or hasattr(file, "fileno")
            return result

        return saved

    def built(self, ddp: Any) -> None:
        self._observe(InReplicas(ddp))

    def _sharded(self, forward: Any, model: ShardedModel, /, *arguments: Any, **keywords: Any) -> Any:
        if self._state.model is None or self._state.model.module is not model.module:
            self._observe(InShards(model, Given()))
        return forward(model, *arguments, **keywords)

    def _observe(self, model: InReplicas | InShards) -> None:
        if self._state.model is not None:
            raise second_model("compare")
        self._state.model = model
        if distributed.get_world_size() > 1:
            self._group = distributed.new_group()
        model.module.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)

    def _forward(self, module: Any, arguments: Any, keywords: Any) -> None:
        if self._state.model is None or module is not self._state.model.module or not self._training.forward(module):
            return
        if self._stepped:
            self._begin_step()
        self.steps[-1]["batches"].append(self._epochs.trained((*arguments, *keywords.values())))

    def _begin_step(self) -> None:
        """Note what a step begins with. Raises ``EnoughSteps``."""
        assert self._state.model is not None
        self._state.model.settle()
        number = len(self.steps)
        if self.checkpoint is None and not self._resumed and self._any_saved() and number:
            self._checkpoints_left -= 1
            if not self._checkpoints_left:
                self.checkpoint = number
                self.snapshots["checkpoint"] = self._snapshot()
        since = 0 if self._resumed else self.checkpoint
        if number == self._most if since is None else number - since == self._wanted:
            raise EnoughSteps
        self._stepped, self._saved = False, False
        self.steps.append({"batches": [], "random": _random(), "draws": False})
        if number == 0:
            self.snapshots["first"] = self._snapshot()

    def _any_saved(self) -> bool:
        """Whether any rank has written a checkpoint since the last step. All ranks must ask."""
        saved = torch.tensor([int(self._saved)])
        if self._group is not None:
            distributed.all_reduce(saved, op=distributed.ReduceOp.MAX, group=self._group)
        return bool(saved)

    def _noted_update(self, *_: Any) -> None:
        if self.steps:
            self.steps[-1]["draws"] |= self.steps[-1]["random"] != _random()
            self._stepped = True

    def _snapshot(self) -> dict[str, Any]:
        """What could be lost by a checkpoint. All ranks must ask."""
        names = {id(each): name for name, each in self._state.parameters()}
        states = {
            f"{key} of {names[id(parameter)]}": digest(value) if isinstance(value, torch.Tensor) else repr(value)
            for optimizer in self._state.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        tensors = [*self._state.parameters(), *self._state.buffers().items()]
        return {
            "parameters": {name: digest(whole(each)) for name, each in tensors},
            "optimizer": states,
            "rates": [float(group["lr"]) for each in self._state.optimizers for group in each.param_groups],
            "schedulers": [[type(each).__name__, each.last_epoch] for each in self._schedulers],
            "scalers": [each.state_dict() for each in self._scalers],
            "random": _random(),
        }


def _random() -> int:
    return hashed(content(torch.get_rng_state()))


def _become_rank(request: Any, start: Any, folder: Path, rank: int) -> NoReturn:
    code = 1
    try:
        become(rank, start.devices, folder, seed=rank + _OTHER_SEEDS * start.resumed)
        epochs = Epochs(rank, start.devices)
        data_loaders.install(epochs)
        observer = ResumeObserver(epochs, request, resumed=start.resumed)
        observer.install()
        error = _error_of(request, start, observer, rank)
        record = {
            "error": error,
            "steps": observer.steps,
            "snapshots": observer.snapshots,
            "checkpoint": observer.checkpoint,
            "epochs": epochs.written(),
        }
        (folder / REPORT.format(rank)).write_text(json.dumps(record), encoding="utf-8")
        code = 0
    except BaseException:
        traceback.print_exc()
    end_process(code)


def _error_of(request: Any, start: Any, observer: ResumeObserver, rank: int) -> tuple[str, str, str] | None:
    """Run the script; returns the parts of the error that ended it. One after the last step that is needed is none."""
    error: ConfigError | None = None
    try:
        run_as_main(request.script, start.arguments)
    except EnoughSteps:
        return None
    except Refused as refused:
        error = refused.error
    except ConfigError as mistake:
        error = mistake
    except BaseException as raised:
        error = died(request, rank, raised) if not isinstance(raised, SystemExit) or raised.code else None
    is_known = observer.checkpoint is not None or (start.resumed and len(observer.steps) > 1)
    return None if error is None or is_known else parts(error)


def main(folder: Path) -> None:
    """Start the script as the request in the folder asks, and again once it has written a checkpoint."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored until here
    text = (folder / REQUEST).read_text(encoding="utf-8")
    request = json.loads(text, object_hook=lambda each: SimpleNamespace(**each))
    for start in request.starts:
        own = folder / start.folder
        own.mkdir()
        awaited([forked(partial(_become_rank, request, start, own, rank)) for rank in range(start.devices)])
        paths = [own / REPORT.format(rank) for rank in range(start.devices)]
        if not all(path.exists() and json.loads(path.read_text())["checkpoint"] for path in paths):
            return
