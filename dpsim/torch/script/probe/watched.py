"""Watches some steps of DDP or FSDP in a process of the user's own job, writes down what it saw, and takes itself away.

Loads nothing but the standard library and the job's PyTorch. A mistake in here ends the watching, never the job.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import statistics
from collections.abc import Callable
from time import perf_counter as now
from typing import Any

import torch

from .around import SETTLED_STEPS, CoreTime, Script
from .rank_record import rank_record
from .waited import ShardedRoot, WaitedCollectives

LONGEST_S, LEAST_STEPS = 90.0, 5
"""From the first step on, watching ends after so many seconds, once there are this many steps."""
_LOGGED_STEPS = 4
"""Watched steps on a processor for which DDP's log is read; it takes some 0.1 ms a step, and tells little more."""
_USUAL_SAMPLE_RATE = 100
_NANOSECOND_S = 1e-9
_DURATIONS = ("forward_s", "backward_s", "update_s", "input_s")


_WATCHERS: list[Watcher] = []
"""What watches the model of this process."""


def await_model(ddp_class: Any) -> None:
    """Let the first DDP model of this process be watched, in the way that the environment asks for."""
    initialise = ddp_class.__init__

    @functools.wraps(initialise)
    def watched(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialise(self, *arguments, **keywords)
        if type(self) is ddp_class or _WATCHERS:
            _watch(Watcher, lambda: self)

    ddp_class.__init__ = watched


def await_root(state_class: Any) -> None:
    """Let the first model of this process that ``fully_shard`` has sharded be watched, likewise.

    FSDP finds out in the first forward which module is the root.
    """
    initialise = state_class._lazy_init

    @functools.wraps(initialise)
    def watched(self: Any) -> None:
        knows = self._is_root is not None
        initialise(self)
        if self._is_root and not knows:
            _watch(ShardedWatcher, lambda: ShardedRoot(self))

    state_class._lazy_init = watched


def _watch(kind: type[Watcher], model: Callable[[], Any]) -> None:
    """Watch a model, unless another one is watched: two do not say what a step is."""
    steps, folder = os.environ["DPSIM_WATCH"].split(":", 1)
    try:
        if _WATCHERS and _WATCHERS[0].pid == os.getpid():
            _WATCHERS[0].second_model()
        else:
            _WATCHERS[:] = [kind(model(), int(steps), folder)]
    except Exception:
        for watcher in _WATCHERS:
            watcher.give_up("dpsim failed to watch it")


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is called only while the watcher watches, counts its own time, and gives up if it fails.

    Where it is not called, or fails, it returns False.
    """

    @functools.wraps(method)
    def called(self: Watcher, *arguments: Any) -> Any:
        if not self.watches or self.pid != os.getpid():
            return False
        self._entered_s = began_s = now()
        result = False
        try:
            result = method(self, *arguments)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
        self.own_s += now() - began_s
        return result

    return called


class Watcher(Script):
    """Notes the moments of ``wanted`` steps of a DDP model; a step ends with a synchronising backward."""

    before_forward, after_forward = _guarded(Script.before_forward), _guarded(Script.after_forward)
    before_backward, after_backward = _guarded(Script.before_backward), _guarded(Script.after_backward)
    before_update, after_update = _guarded(Script.before_update), _guarded(Script.after_update)
    before_preparation, after_preparation = _guarded(Script.before_preparation), _guarded(Script.after_preparation)

    def __init__(self, ddp: Any, wanted: int, folder: str) -> None:
        self._entered_s = now()
        super().__init__()
        self.pid, self.own_s = os.getpid(), 0.0
        self.ddp, self._wanted, self._folder = ddp, wanted, folder
        self._on_gpu = ddp.device_type == "cuda"
        self.backend = str(torch.distributed.get_backend(ddp.process_group))  # the job may end its groups before it
        self.steps: list[dict[str, Any]] = []
        self.accumulate = self.local_batch = 1
        self.ready_ns: list[list[int]] = []
        self._tails_ns: list[int] = []
        self.last_backward_s: list[float] = []
        self.loss_s: list[float] = []
        self._first_s: float | None = None
        self.optimizer: Any = None
        self.loader: Any = None
        self._core = CoreTime()
        self.listen()
        self.listen_to_updates_and_input()
        self.listen_to_model(ddp)
        self._clear(now(), self._core.waited_s())
        self._at_exit = functools.partial(self.give_up, "")
        atexit.register(self._at_exit)
        self.own_s = now() - self._entered_s
        if unknown := self.unknown(ddp):
            self.give_up(unknown)

    def listen_to_model(self, ddp: Any) -> None:
        """Let DDP log its times."""
        ddp._set_ddp_runtime_logging_sample_rate(1)
        self._undo.append(lambda: ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE))

    def unknown(self, ddp: Any) -> str:
        """Return why a model cannot be watched; nothing where it can."""
        device = ddp.device_type
        return "" if device in ("cpu", "cuda") else f"its model is on {device}, whose times DDP does not log"

    def second_model(self) -> None:
        """Stop, for one of two models does not say what a step is."""
        self.give_up("it trains two models with DistributedDataParallel or fully_shard")

    def give_up(self, reason: str) -> None:
        """Stop watching, and write down what there is; ``reason`` is empty where the job itself has ended."""
        if self.watches and self.pid == os.getpid():
            self._entered_s = now()
            self._end(reason)

    # What is noted.

    def _mark(self) -> tuple[Any, float]:
        """The moment in the work of the device, seconds or an event, and the seconds of this thread without a core."""
        without_core_s = self._core.waited_s()
        if not self._on_gpu:
            return now(), without_core_s
        (event := torch.cuda.Event(enable_timing=True)).record()
        return event, without_core_s

    def _clear(self, ended_s: float, without_core_s: float) -> None:
        self._began_s, self._input_s, self._input_delayed_s = ended_s, 0.0, 0.0
        self._seconds: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _DURATIONS[:3]}
        self._without_core_s = without_core_s

    def forward_begins(self, samples: int) -> None:
        if self._first_s is None:
            self._first_s = now()
        self.local_batch = max(self.local_batch, samples)
        self._began = self._mark()

    def forward_ends(self) -> None:
        ended = self._mark()
        self._seconds["forward_s"].append((self._began, ended))
        if self.synchronises:
            self._counted_from = ended

    def backward_begins(self) -> None:
        self._began = self._mark()

    def backward_ends(self) -> None:
        self._ended = self._mark()
        if not self.synchronises:
            self._seconds["backward_s"].append((self._began, self._ended))

    def step_ends(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
        ended_s = now()
        without_core_s = self._core.waited_s()
        if self.synchronised > SETTLED_STEPS:
            self._note_step(ended_s)
        self._clear(ended_s, without_core_s)
        late = now() - (self._first_s or 0.0) > LONGEST_S and len(self.steps) >= LEAST_STEPS
        if len(self.steps) >= self._wanted or late:
            self._end("")

    def update_begins(self, optimizer: Any) -> None:
        self.optimizer, self._update_began = optimizer or self.optimizer, self._mark()

    def update_ends(self, optimizer: Any) -> None:
        self._seconds["update_s"].append((self._update_began, self._mark()))

    def load(self, original: Callable[..., Any], iterator: Any) -> Any:
        without_core_s = self._core.waited_s()
        batch = super().load(original, iterator)
        self._input_delayed_s += self._core.waited_s() - without_core_s
        return batch

    @_guarded
    def loaded(self, iterator: Any, seconds: float) -> None:
        self.loader = iterator
        self._input_s += seconds

    def _note_step(self, ended_s: float) -> None:
        """Note a step. DDP counts from the end of forward until each gradient was ready, and until all were.

        The time without a core is read at the end of backward: as much of it as of backward counts until then.
        """

        def moment_s(mark: tuple[Any, float]) -> float:
            return float(ended_s - mark[0].elapsed_time(self._ended[0]) * 1e-3 if self._on_gpu else mark[0])

        ready_ns = self.ddp.reducer.get_backward_stats()
        began_s, counted_from_s = moment_s(self._began), moment_s(self._counted_from)
        computed_s = min(counted_from_s + self._all_ready_ns(ready_ns) * _NANOSECOND_S, ended_s)
        seconds = {
            name: sum(moment_s(end) - moment_s(begin) for begin, end in spans) for name, spans in self._seconds.items()
        }
        seconds["backward_s"] += computed_s - began_s
        delayed_s = self._ended[1] - self._began[1]
        delayed_s *= (computed_s - began_s) / max(moment_s(self._ended) - began_s, computed_s - began_s, _NANOSECOND_S)
        computing_s = sum(end[1] - begin[1] for spans in self._seconds.values() for begin, end in spans)
        self.accumulate = self.micro_batches
        self.last_backward_s.append(computed_s - began_s)
        self.loss_s.append(began_s - counted_from_s)
        self.ready_ns.append(ready_ns)
        self.steps.append(
            seconds
            | {"input_s": self._input_s, "began_s": self._began_s, "computed_s": computed_s, "ended_s": ended_s}
            | {"delayed_s": self._began[1] - self._without_core_s + delayed_s}
            | {"computing_delayed_s": computing_s + delayed_s, "input_delayed_s": self._input_delayed_s}
        )

    def _all_ready_ns(self, ready_ns: list[int]) -> int:
        """When all gradients were ready, and what else backward computes was done, as DDP's log has it.

        On a processor this is the same time after the last gradient in every step, so that some logs are enough.
        """
        last_ns = max(ready_ns, default=0)
        if not self._on_gpu and len(self._tails_ns) == _LOGGED_STEPS:
            return last_ns + int(statistics.median(self._tails_ns))
        self.ddp.logger.set_runtime_stats_and_log()
        logged_ns: int = max(self.ddp._get_ddp_logging_data().get("backward_compute_time", 0), 0)
        if not self._on_gpu:
            self._tails_ns.append(max(logged_ns - last_ns, 0))
            if len(self._tails_ns) == _LOGGED_STEPS:
                self.ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
        return logged_ns

    # What is left of it.

    def _end(self, reason: str) -> None:
        """Take every hook away, and write the record."""
        self.leave()
        atexit.unregister(self._at_exit)
        try:
            record = rank_record(self, reason)
            path = os.path.join(self._folder, f"rank-{record['rank']}-{self.pid}.json")  # one of each attempt
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                file.write(json.dumps(record).removesuffix("}"))
                file.write(f', "own_s": {self.own_s + now() - self._entered_s}}}')
            os.replace(f"{path}.part", path)
        except Exception:  # also where the folder is gone, as ``dpsim explain`` may be
            return
        finally:
            self._core.close()
            self.ddp = self.optimizer = self.loader = None


class ShardedWatcher(Watcher):
    """Notes the steps of a model that ``fully_shard`` has sharded, on processors: each rank waits for each collective.

    Its clock stands still within them. The root's forward is seen by a hook of its own, from the second one on.
    """

    def listen_to_model(self, ddp: Any) -> None:
        """Put hooks around the root's forward, FSDP's own inside of them, and this around FSDP's collectives."""
        self.waited = WaitedCollectives(self.wrap, self._core)
        self.sizes: dict[str, list[int]] = {}
        self._in_forward = False
        for handle in (
            ddp.module.register_forward_pre_hook(self._forward_begins, prepend=True, with_kwargs=True),
            ddp.module.register_forward_hook(self._forward_ends),
        ):
            self._undo.append(handle.remove)

    def unknown(self, ddp: Any) -> str:
        if ddp.device_type != "cpu":
            return f"fully_shard gathers beside computation on {ddp.device_type}, as traces show: dpsim explain --trace"
        return "its shards are replicated (HSDP), and allreduces of shards are not timed" if ddp.is_replicated else ""

    def _forward_begins(self, module: Any, arguments: Any, keywords: Any) -> None:
        self._in_forward = self.before_forward(self.ddp, (*arguments, *keywords.values()))

    def _forward_ends(self, module: Any, arguments: Any, result: Any) -> None:
        if self._in_forward:
            self._in_forward = False
            self.after_forward()

    def _mark(self) -> tuple[Any, float]:
        own: tuple[float, float] = self.waited.own((now(), self._core.waited_s()))
        return own

    def _clear(self, ended_s: float, without_core_s: float) -> None:
        super()._clear(ended_s, without_core_s)
        self._step_began = self._mark()
        self.waited.forget()

    def _note_step(self, ended_s: float) -> None:
        seconds = {name: sum(end[0] - begin[0] for begin, end in spans) for name, spans in self._seconds.items()}
        delayed_s = sum(end[1] - begin[1] for spans in self._seconds.values() for begin, end in spans)
        backward_s = self._ended[0] - self._began[0]
        seconds["backward_s"] += backward_s
        self.accumulate = self.micro_batches
        self.last_backward_s.append(backward_s)
        self.loss_s.append(0.0)
        self.ready_ns.append([])
        self.sizes = self.waited.of_rank()
        self.steps.append(
            seconds
            | {"input_s": self._input_s, "began_s": self._began_s, "ended_s": ended_s}
            | {"computed_s": min(self._began_s + self._ended[0] - self._step_began[0], ended_s)}
            | {"delayed_s": self._ended[1] - self._step_began[1], "input_delayed_s": self._input_delayed_s}
            | {"computing_delayed_s": delayed_s + self._ended[1] - self._began[1]}
            | self.waited.of_step()
        )
