"""Watches some steps of DDP in a process of the user's own job, writes down what it saw, and takes itself away again.

Loads nothing but the standard library and the job's PyTorch. A mistake in here ends the watching, never the job.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from time import perf_counter as now
from typing import Any

WARM_UP_STEPS = 4
"""Synchronising steps before the first that is watched: DDP rebuilds its buckets as the second one begins."""
LONGEST_S, LEAST_STEPS = 35.0, 5
"""From the first step on, watching ends after so many seconds, once there are this many steps."""
_LOGGED_STEPS = 4
"""Watched steps on a processor for which DDP's log is read; it takes some 0.1 ms a step, and tells little more."""
_USUAL_SAMPLE_RATE = 100
_NANOSECOND_S = 1e-9
_SCHEDSTAT = "/proc/thread-self/schedstat"
_DURATIONS = ("forward_s", "backward_s", "update_s", "input_s")


def await_model(ddp_class: Any) -> None:
    """Let the first DDP model of this process be watched, in the way that the environment asks for."""
    steps, folder = os.environ["DPSIM_WATCH"].split(":", 1)
    initialise = ddp_class.__init__
    watchers: list[Watcher] = []

    @functools.wraps(initialise)
    def watched(self: Any, *arguments: Any, **keywords: Any) -> None:
        initialise(self, *arguments, **keywords)
        try:
            if watchers and watchers[0].pid == os.getpid():
                watchers[0].second_model()
            elif type(self) is ddp_class:
                watchers[:] = [Watcher(self, int(steps), folder)]
        except Exception:
            _forget(watchers)

    ddp_class.__init__ = watched


def _run() -> str:
    """What the ranks of one attempt of a job have in common, as torchrun or the job itself tells them."""
    named = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return f"{address if named == 'none' else named} attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _forget(watchers: list[Watcher]) -> None:
    for watcher in watchers:
        watcher.give_up("dpsim failed to watch it")


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A method that is called only while the watcher watches, counts its own time, and gives up where it fails."""

    @functools.wraps(method)
    def called(self: Watcher, *arguments: Any) -> None:
        if not self.watches or self.pid != os.getpid():
            return
        self._entered_s = began_s = now()
        try:
            method(self, *arguments)
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")
        self.own_s += now() - began_s

    return called


class Watcher:
    """Notes the moments of ``wanted`` steps of a DDP model; a step ends with a synchronising backward."""

    def __init__(self, ddp: Any, wanted: int, folder: str) -> None:
        self._entered_s = now()
        import torch
        from torch.optim import optimizer
        from torch.utils.data import dataloader

        self.pid, self.watches, self.own_s = os.getpid(), True, 0.0
        self._torch, self._ddp, self._wanted, self._folder = torch, ddp, wanted, folder
        self._on_gpu = ddp.device_type == "cuda"
        self._backend = str(torch.distributed.get_backend(ddp.process_group))  # the job may end its groups before it
        self._steps: list[dict[str, Any]] = []
        self._warmed_up = self._depth = self._micro_batches = 0
        self.accumulate = self.local_batch = 1
        self._ready_ns: list[list[int]] = []
        self._tails_ns: list[int] = []
        self._last_backward_s: list[float] = []
        self._loss_s: list[float] = []
        self._first_s: float | None = None
        self._optimizer: Any = None
        self._update_began: Any = None
        self._loader: Any = None
        self._training = self._synchronises = False
        self._evaluated = self._in_evaluation_mode = False
        self._core = _CoreTime()
        self._clear(now(), self._core.waited_s())
        self._undo: list[Callable[[], None]] = []
        for owner, name, wrapper in (
            (type(ddp), "forward", self._forward),
            (torch.autograd, "backward", self._backward),
            (dataloader._BaseDataLoaderIter, "__next__", self._next),
        ):
            self._wrap(owner, name, wrapper)
        for register, note in (
            (optimizer.register_optimizer_step_pre_hook, self._update_begins),
            (optimizer.register_optimizer_step_post_hook, self._update_ends),
        ):
            self._undo.append(register(lambda *given, note=note: note(given[0])).remove)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        self._undo.append(lambda: ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE))
        self._at_exit = functools.partial(self.give_up, "")
        atexit.register(self._at_exit)
        self.own_s = now() - self._entered_s
        if ddp.device_type not in ("cpu", "cuda"):
            self.give_up(f"its model is on {ddp.device_type}, whose times DDP does not log")

    def second_model(self) -> None:
        """Stop, for one of two models does not say what a step is."""
        self.give_up("it trains two models with DistributedDataParallel")

    def give_up(self, reason: str) -> None:
        """Stop watching, and write down what there is; ``reason`` is empty where the job itself has ended."""
        if self.watches and self.pid == os.getpid():
            self._entered_s = now()
            self._end(reason)

    # What is put around the job's calls.

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            if not self.watches:
                return original(*arguments, **keywords)
            return wrapper(original, *arguments, **keywords)

        def undo() -> None:
            if getattr(owner, name) is wrapped:  # else somebody has wrapped it again since
                setattr(owner, name, original)

        setattr(owner, name, wrapped)
        self._undo.append(undo)

    def _forward(self, original: Callable[..., Any], ddp: Any, /, *arguments: Any, **keywords: Any) -> Any:
        if ddp is not self._ddp or not self._trains(ddp):
            return original(ddp, *arguments, **keywords)
        self._forward_begins(arguments, keywords)
        result = original(ddp, *arguments, **keywords)
        self._forward_ends()
        return result

    def _trains(self, ddp: Any) -> bool:
        """Whether this forward pass of ``ddp`` trains, as ``dpsim.torch_ddp.record.Training`` decides it."""
        if not self._torch.is_grad_enabled():
            return False
        trains = self._in_evaluation_mode or any(module.training for module in ddp.modules())
        self._evaluated = not trains
        return trains

    def _backward(self, original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self._depth += 1
        self._in_evaluation_mode |= self._evaluated
        outermost, began = self._depth == 1 and self._training, self._mark()
        try:
            result = original(*arguments, **keywords)
        finally:
            self._depth -= 1
        if outermost:
            self._backward_ends(began)
        return result

    def _next(self, original: Callable[..., Any], iterator: Any) -> Any:
        began_s = now()
        try:
            return original(iterator)
        finally:
            self._loader = iterator
            self._input_s += now() - began_s

    # What is noted.

    def _mark(self) -> Any:
        """The moment in the work of the device: seconds of the host, or an event, which ``_seconds_of`` makes some."""
        if not self._on_gpu:
            return now()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _clear(self, ended_s: float, without_core_s: float) -> None:
        self._began_s, self._input_s = ended_s, 0.0
        self._seconds: dict[str, list[tuple[Any, Any]]] = {name: [] for name in _DURATIONS[:3]}
        self._micro_batches = 0
        self._without_core_s = without_core_s

    @_guarded
    def _forward_begins(self, arguments: Any, keywords: Any) -> None:
        if self._first_s is None:
            self._first_s = now()
        self._training, self._synchronises = True, self._ddp.require_backward_grad_sync
        self.local_batch = max(self.local_batch, next(self._extents((*arguments, *keywords.values())), 1))
        self._forward_began = self._mark()

    def _extents(self, values: tuple[Any, ...]) -> Iterator[int]:
        """The leading extents of the tensors in ``values``; to look into other values takes longer."""
        tensor = self._torch.Tensor
        for value in values:
            for each in (value,) if isinstance(value, tensor) else self._torch.utils._pytree.tree_leaves(value):
                if isinstance(each, tensor) and each.dim():
                    yield each.shape[0]

    @_guarded
    def _forward_ends(self) -> None:
        ended = self._mark()
        self._seconds["forward_s"].append((self._forward_began, ended))
        if self._synchronises:
            self._counted_from = ended

    @_guarded
    def _update_begins(self, optimizer: Any) -> None:
        self._optimizer, self._update_began = optimizer, self._mark()

    @_guarded
    def _update_ends(self, optimizer: Any) -> None:
        if self._update_began is not None:
            self._seconds["update_s"].append((self._update_began, self._mark()))
            self._update_began = None

    @_guarded
    def _backward_ends(self, began: Any) -> None:
        self._training = False
        self._micro_batches += 1
        ended = self._mark()
        if self._update_began is not None:  # the optimizer's step has called a closure, which is no update
            self._update_began = ended
        if not self._synchronises:
            self._seconds["backward_s"].append((began, ended))
            return
        if self._on_gpu:
            self._torch.cuda.synchronize()
        ended_s = now()
        without_core_s = self._core.waited_s()
        if self._warmed_up < WARM_UP_STEPS:
            self._warmed_up += 1
        else:
            self._step_ends(began, ended, ended_s, without_core_s - self._without_core_s)
        self._clear(ended_s, without_core_s)
        late = now() - (self._first_s or 0.0) > LONGEST_S and len(self._steps) >= LEAST_STEPS
        if len(self._steps) >= self._wanted or late:
            self._end("")

    def _step_ends(self, began: Any, ended: Any, ended_s: float, delayed_s: float) -> None:
        """Note a step. DDP counts from the end of forward until each gradient was ready, and until all were.

        The time without a core is read at the end of the step: as much of it as of the step counts until then.
        """

        def moment_s(mark: Any) -> float:
            return float(ended_s - mark.elapsed_time(ended) * 1e-3 if self._on_gpu else mark)

        ready_ns = self._ddp.reducer.get_backward_stats()
        began_s, counted_from_s = moment_s(began), moment_s(self._counted_from)
        computed_s = min(counted_from_s + self._all_ready_ns(ready_ns) * _NANOSECOND_S, ended_s)
        seconds = {
            name: sum(moment_s(end) - moment_s(begin) for begin, end in spans) for name, spans in self._seconds.items()
        }
        seconds["backward_s"] += computed_s - began_s
        self.accumulate = self._micro_batches
        self._last_backward_s.append(computed_s - began_s)
        self._loss_s.append(began_s - counted_from_s)
        self._ready_ns.append(ready_ns)
        self._steps.append(
            seconds
            | {"input_s": self._input_s, "began_s": self._began_s, "computed_s": computed_s, "ended_s": ended_s}
            | {"delayed_s": delayed_s * (computed_s - self._began_s) / (ended_s - self._began_s)}
        )

    def _all_ready_ns(self, ready_ns: list[int]) -> int:
        """When all gradients were ready, and what else backward computes was done, as DDP's log has it.

        On a processor this is the same time after the last gradient in every step, so that some logs are enough.
        """
        last_ns = max(ready_ns, default=0)
        if not self._on_gpu and len(self._tails_ns) == _LOGGED_STEPS:
            return last_ns + int(statistics.median(self._tails_ns))
        self._ddp.logger.set_runtime_stats_and_log()
        logged_ns: int = max(self._ddp._get_ddp_logging_data().get("backward_compute_time", 0), 0)
        if not self._on_gpu:
            self._tails_ns.append(max(logged_ns - last_ns, 0))
            if len(self._tails_ns) == _LOGGED_STEPS:
                self._ddp._set_ddp_runtime_logging_sample_rate(_USUAL_SAMPLE_RATE)
        return logged_ns

    # What is left of it.

    def _end(self, reason: str) -> None:
        """Take every hook away, and write the record."""
        self.watches = False
        for undo in self._undo:
            undo()
        atexit.unregister(self._at_exit)
        try:
            record = self._record(reason)
            path = os.path.join(self._folder, f"rank-{record['rank']}-{self.pid}.json")  # one of each attempt
            with open(f"{path}.part", "w", encoding="utf-8") as file:
                file.write(json.dumps(record).removesuffix("}"))
                file.write(f', "own_s": {self.own_s + now() - self._entered_s}}}')
            os.replace(f"{path}.part", path)
        except Exception:  # also where the folder is gone, as ``dpsim explain`` may be
            return
        finally:
            self._core.close()
            self._ddp = self._optimizer = self._loader = None

    def _record(self, reason: str) -> dict[str, Any]:
        ddp = self._ddp
        logged = dict(ddp._get_ddp_logging_data())
        return {
            "run": _run(),
            "rank": int(logged["rank"]),
            "ranks": int(logged["world_size"]),
            "ranks_here": int(os.environ.get("LOCAL_WORLD_SIZE") or logged["world_size"]),
            "reason": reason,
            "script": os.path.basename(getattr(sys.modules.get("__main__"), "__file__", None) or ""),
            "model": type(ddp.module).__name__,
            "torch": str(self._torch.__version__),
            "device": ddp.device_type,
            "cores": len(os.sched_getaffinity(0)),
            "threads": self._torch.get_num_threads(),
            "backend": self._backend,
            "steps": self._steps,
            "last_backward_s": self._last_backward_s,
            "loss_s": self._loss_s,
            "ready_ns": self._ready_ns,
            "local_batch": self.local_batch,
            "accumulate": self.accumulate,
            "parameters": _parameters(self._torch, ddp),
            "rebuilt": logged.get("rebuilt_per_bucket_param_indices", ""),
            "initial_bucket_bytes": logged["bucket_sizes"],
            "communication_hook": logged.get("comm_hook", ""),
            "bucket_cap_bytes": None if ddp.bucket_bytes_cap_default else int(ddp.bucket_bytes_cap),
            "bucket_caps_bytes": list(getattr(ddp, "bucket_bytes_cap_list", ())),
            "find_unused_parameters": bool(ddp.find_unused_parameters),
            "static_graph": bool(ddp.static_graph),
            "state_bytes": sum(buffer.numel() * buffer.element_size() for buffer in ddp.module.buffers()),
            "optimizer_slots": self._slots(),
            "input_workers": getattr(self._loader, "_num_workers", 0),
        }

    def _slots(self) -> int | None:
        """Arrays of a parameter's size that the optimizer keeps for one; None where no optimizer was seen."""
        if self._optimizer is None:
            return None
        tensor = self._torch.Tensor
        state = [(parameter, kept) for parameter, kept in self._optimizer.state.items() if parameter.dim()]
        return max(
            (sum(isinstance(v, tensor) and v.shape == p.shape for v in kept.values()) for p, kept in state), default=0
        )


def _parameters(torch: Any, ddp: Any) -> list[dict[str, Any]]:
    """The parameters that DDP reduces, in the order of its positions."""
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    found = []
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad or name in ddp.parameters_to_ignore:
            continue
        module = name.rpartition(".")[0]
        owner = ddp.module.get_submodule(module)
        normalises = isinstance(owner, torch.nn.modules.batchnorm._BatchNorm)
        found.append(
            {
                "name": name,
                "module": module,
                "shape": list(parameter.shape),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "batch_norm_channels": owner.num_features if normalises else 0,
                "size_bytes": parameter.numel() * parameter.element_size(),
                "device": str(parameter.device),
                "sparse": isinstance(owner, embeddings) and bool(owner.sparse),
            }
        )
    return found


class _CoreTime:
    """Seconds for which the calling thread was ready to run and had no core, as Linux counts them; 0 elsewhere.

    The file stays open: to open it takes ten times as long as to read it.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._thread = 0

    def waited_s(self) -> float:
        try:
            if self._file is None or self._thread != threading.get_ident():
                self.close()
                self._file, self._thread = os.open(_SCHEDSTAT, os.O_RDONLY), threading.get_ident()
            return int(os.pread(self._file, 128, 0).split()[1]) * _NANOSECOND_S
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None
