"""``allreduce_hook``: DDP's gradients are reduced by dpsim's kernel in shared memory, and DDP stays as it is."""

from __future__ import annotations

import functools
import queue
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from dpsim.comm.clock import now
from dpsim.comm.progress import LOOK_S
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.torch.node import SUMMED, Ranks, SharedBucket, SharedNode

Bucket = Any
"""A ``torch.distributed.GradBucket``."""
Future = Any
"""A ``torch.futures.Future`` of the reduced bucket."""
Overlap = Literal["auto", "inline", "thread", "gloo"]

_SETTLING_STEPS = 4
"""Steps before the first turn: in these DDP makes its buckets anew, and memory is prepared."""
_TURNS = 3
_STEPS_A_TURN = 3
"""The first step of a turn is not counted: it ends what the way before has begun."""
_GAIN = 0.98
"""A way is taken in place of one before it in the list if its step takes at most this part of the other's."""
_GLOO_HOOKS = {
    None: default_hooks.allreduce_hook,
    "float16": default_hooks.fp16_compress_hook,
    "bfloat16": default_hooks.bf16_compress_hook,
}


def allreduce_hook(
    *, wire_dtype: str | None = None, overlap: Overlap = "auto", process_group: Any = None
) -> Callable[[object, Bucket], Future]:
    """Return a communication hook with which DDP takes the mean of its gradients by dpsim's kernel in shared memory.

    ``ddp_model.register_comm_hook(None, dpsim.torch.allreduce_hook())``, on every rank, behind
    ``init_process_group``, whoever started the ranks. Collective over ``process_group``, which is the one that DDP was
    given (the default group if left out). Each DDP model takes a hook of its own.

    ``overlap``: ``inline`` reduces on the thread of backward, which waits at the last bucket alone; ``thread`` on a
    second thread; ``gloo`` is PyTorch's own hook. ``auto`` tries the three in turns in the first steps (two without
    gloo if there is a ``wire_dtype``), and stays with the fastest. ``wire_dtype`` bfloat16 or float16 rounds every
    rank's gradients, and their sum, to 16 bits; between processors of one machine that saves no time.

    Gradients may be float32, float64, bfloat16 or float16 in the host's memory. All others, and all of ranks that
    cannot share memory (on several machines, or in several containers), are left to gloo; rank 0 says so on stderr.
    Raises ``ConfigError``.
    """
    if wire_dtype is not None and wire_dtype not in SIXTEEN_BITS:
        raise ConfigError(f"wire_dtype {wire_dtype!r}", allowed=f"None, {', '.join(SIXTEEN_BITS)}")
    if overlap not in get_args(Overlap):
        raise ConfigError(f"overlap {overlap!r}", allowed=", ".join(get_args(Overlap)))
    if not distributed.is_initialized():
        raise ConfigError(
            "allreduce_hook() before torch.distributed.init_process_group()",
            allowed="a hook that is made where the ranks can agree on memory",
            remedy="call it after init_process_group(), with register_comm_hook",
        )
    ranks = Ranks(process_group)
    node = SharedNode.open(ranks) if ranks.size > 1 else None
    if node is None and ranks.size > 1 and ranks.rank == 0:
        print(
            f"dpsim: the {ranks.size} ranks cannot share memory, so gloo reduces their gradients\n"
            "  to do:   start all of them on one machine and in one container, as one user",
            file=sys.stderr,
        )
    means = BucketMeans(node, process_group, wire_dtype, overlap) if node is not None else None

    reduce = functools.partial(_GLOO_HOOKS[wire_dtype], process_group) if means is None else means.reduce
    hook = lambda state, bucket: reduce(bucket)  # noqa: E731  DDP takes no annotations that are text, as this file's are
    hook.__name__ = hook.__qualname__ = "dpsim_allreduce_hook"
    return hook


class BucketMeans:
    """The means of one DDP model's buckets over the ranks of a node."""

    def __init__(self, node: SharedNode, process_group: Any, wire_dtype: str | None, overlap: Overlap) -> None:
        self._node, self._process_group, self._wire_dtype = node, process_group, wire_dtype
        self._prepared: dict[tuple[int, int], _Kept] = {}
        self._waiting: deque[tuple[SharedBucket, Future]] = deque()
        self._thread: _ReducingThread | None = None
        ways = ["inline", "thread"] if wire_dtype is not None else ["inline", "thread", "gloo"]
        self._fastest = Fastest(ways if overlap == "auto" else [overlap], node.ranks)

    def reduce(self, bucket: Bucket) -> Future:
        """Begin the mean of a bucket; the future of it. Every rank calls it for the same buckets in the same order."""
        way = self._fastest.way
        shared = self._shared(bucket) if way != "gloo" else None
        if shared is None:
            future = _GLOO_HOOKS[self._wire_dtype](self._process_group, bucket)
        else:
            future = torch.futures.Future()
            shared.fill()
            if way == "thread":
                self._thread = self._thread or _ReducingThread(self._node)
                self._thread.submit(shared, future)
            else:
                self._waiting.append((shared, future))
        self._advance(wait=bucket.is_last())
        if bucket.is_last():
            self._fastest.step_ended()
        return future

    def _advance(self, *, wait: bool) -> None:
        """Move on what this thread reduces; with ``wait`` until all of it is done, else as far as others have come."""
        while self._waiting:
            shared, future = self._waiting[0]
            if wait:
                shared.mean.run()
            elif not shared.mean.done():
                return
            self._waiting.popleft()
            future.set_result(shared.result())

    def _shared(self, bucket: Bucket) -> SharedBucket | None:
        """Return the prepared bucket; None where gloo must reduce it. Collective where it is a new one."""
        tensor = bucket.buffer()
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in SUMMED:
            return None
        key = tensor.data_ptr(), tensor.numel()
        if key not in self._prepared:
            _refuse_join()
            shared = self._node.prepare(tensor, self._wire_dtype)
            parameters = {id(parameter) for parameter in bucket.parameters()}
            for older in [older for older, prepared in self._prepared.items() if prepared.parameters & parameters]:
                del self._prepared[older]  # DDP has made its buckets anew, and a parameter is in one of them
            key = tensor.data_ptr(), tensor.numel()
            self._prepared[key] = _Kept(tensor, shared, parameters)
        return self._prepared[key].shared


class _Kept(NamedTuple):
    """A bucket's memory, which stays this bucket's as long as it is kept, and the parameters that are in it."""

    memory: torch.Tensor
    shared: SharedBucket | None
    parameters: set[int]


def _refuse_join() -> None:
    """Raise ``ConfigError`` where DDP asks for a bucket of zeros, as a rank does that has ended early."""
    if any(frame.f_code.co_name == "_match_all_reduce_for_bwd_pass" for frame, _ in traceback.walk_stack(None)):
        raise ConfigError(
            "a rank that has trained fewer batches than others, in join() of DistributedDataParallel",
            allowed="as many batches on every rank",
            remedy="give every rank as many batches, or use allreduce_hook(overlap='gloo')",
        )


class _ReducingThread:
    """A thread that reduces buckets one after another during backward. It naps while it waits, to free its core."""

    def __init__(self, node: SharedNode) -> None:
        self._node = node
        self._queue: queue.SimpleQueue[tuple[SharedBucket, Future]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="dpsim-communication", daemon=True).start()

    def submit(self, shared: SharedBucket, future: Future) -> None:
        self._queue.put((shared, future))

    def _serve(self) -> None:
        while True:
            shared, future = self._queue.get()
            try:
                while not shared.mean.done():
                    time.sleep(LOOK_S)
                    self._node.check_ranks()
                future.set_result(shared.result())
            except Exception as error:  # handed to the thread of backward, which raises it
                future.set_exception(error)


class Fastest:
    """The choice of the fastest way: ``way`` is that of the next step, on all ranks. Its last bucket ends a step."""

    def __init__(self, ways: Sequence[str], ranks: Ranks) -> None:
        self.way = ways[0]
        self._ranks = ranks
        self._ways = list(ways)
        self._steps = -_SETTLING_STEPS
        self._ended_s = 0.0
        self._samples: dict[str, list[float]] = {way: [] for way in ways}

    def step_ended(self) -> None:
        """Take the time of the step that has ended, and say which way the next one uses. Collective at times."""
        if len(self._ways) == 1:
            return
        ended_s = now()
        if self._steps >= 0 and self._steps % _STEPS_A_TURN:
            self._samples[self.way].append(ended_s - self._ended_s)
        self._ended_s = ended_s
        self._steps += 1
        turn = max(self._steps, 0) // _STEPS_A_TURN
        self.way = self._ways[turn % len(self._ways)]
        if turn == _TURNS * len(self._ways):
            self._decide()

    def _decide(self) -> None:
        of_ranks = self._ranks.allgather({way: statistics.median(times) for way, times in self._samples.items()})
        step_s = {way: max(medians[way] for medians in of_ranks) for way in self._ways}
        self.way = self._ways[0]
        for way in self._ways[1:]:
            if step_s[way] < _GAIN * step_s[self.way]:
                self.way = way
        self._ways = [self.way]
