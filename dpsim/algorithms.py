"""The allreduce algorithms: one ``Algorithm`` each, from which the runtime, the model, the flags and the docs take it.

Loads nothing: the implementation is named, and imported when an allreduce is first run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

from dpsim.registry import Registry

Place = Literal["messages", "shared memory", "library", "elsewhere"]


class Line(NamedTuple):
    """Seconds of an allreduce of M bytes over a link: alpha latency + M (beta / bandwidth + gamma reduce_s_per_byte).

    ``dpsim.model.formulas`` computes them, with the link's overheads of a message and of a bucket.

    ``*_in_node`` are the same over the link inside a node; only an algorithm that tells the two apart has them.
    ``senders`` devices of a node send over its link at the same time and share it; where a link is emulated each has
    its own.
    """

    alpha: float
    beta: float
    gamma: float
    alpha_in_node: float = 0.0
    beta_in_node: float = 0.0
    gamma_in_node: float = 0.0
    senders: int = 1


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One allreduce algorithm. No field has a default, so that none can be forgotten.

    ``lines(nodes, devices of a node)`` are its cost by the link's formula: the lowest of them at each size.
    ``rounds(nodes, devices of a node)`` is how many rounds of messages follow one another, each of which ends when a
    rank polls. Where an algorithm ignores nodes, only the product of both matters.
    ``place`` is where it can run: by ``messages`` over any network, in the ``shared memory`` of one node, in the MPI
    ``library``, whose messages dpsim does not see, or ``elsewhere``: it is priced, and does not run on the CPU.
    ``sixteen_bits``: whether it can send gradients as 16 bits without leaves; ``sixteen_bit_messages``: whether all
    that it sends has 16 bits then.
    ``has_reduce_scatter``: whether its reduce-scatter and its all-gather can run, or be priced, one without the other.
    ``steps(transport, data)`` yields its rounds of messages: the function, or its ``module:name``. None: it is made of
    a list of steps (``dpsim.comm.message_steps``), or has no messages.
    """

    name: str
    summary: str
    place: Place
    lines: Callable[[int, int], tuple[Line, ...]]
    rounds: Callable[[int, int], int]
    sixteen_bits: bool
    sixteen_bit_messages: bool
    has_reduce_scatter: bool
    steps: Callable[..., Any] | str | None


ALGORITHMS: Registry[Algorithm] = Registry("algorithm", Algorithm, group="dpsim.algorithms")


NCCL = "nccl"
"""The algorithm that runs on GPUs alone, in an order of addition of its own."""

Backend = Literal["cpu", "cuda"]
"""Where a training runs: on the CPU, or on GPUs, in whose memory CUDA kernels reduce the gradients."""
BACKENDS: tuple[str, ...] = get_args(Backend)

CUDA_VERSIONS = {
    "auto": "two-shot",
    "one-shot": "one-shot",
    "two-shot": "two-shot",
    "direct": "two-shot",
    "ring": "ring",
    "halving-doubling": "halving-doubling",
}
"""The algorithms of a plan that the CUDA kernels have, and by which version (``dpsim.kernels.allreduce``).

``auto`` is two-shot but for small arrays between GPUs that reach each other's memory (``dpsim.comm.cuda.peer_memory``).
Between GPUs that do not reach each other's memory there is one, whatever the name: that of ``dpsim.comm.cuda.staged``.
"""

SIXTEEN_BIT_VERSION = "two-shot"
"""The version that sends gradients as 16 bits."""

RUNNABLE: tuple[Place, ...] = ("messages", "shared memory", "library")


def algorithms_in(*places: Place) -> tuple[str, ...]:
    """The names of the algorithms that run in one of these places."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.place in places)


def _fold(n: int) -> tuple[int, int, int]:
    """(log2 p, p, extra) where p is the largest power of two <= n; extra is 1 where p < n, else 0."""
    log2 = n.bit_length() - 1
    return log2, 2**log2, int(2**log2 < n)


def _ring(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    n = nodes * of_a_node
    return (Line(2 * (n - 1), 2 * (n - 1) / n, (n - 1) / n),)


def _one_shot(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    others = nodes * of_a_node - 1
    return (Line(others, others, others),)


def _doubling(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    log2, _, extra = _fold(nodes * of_a_node)
    return (Line(log2 + 2 * extra, log2 + 2 * extra, log2 + extra),)


def _halving(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    log2, p, extra = _fold(nodes * of_a_node)
    return (Line(2 * log2 + 2 * extra, 2 * (p - 1) / p + 2 * extra, (p - 1) / p + extra),)


def _library(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    return _doubling(nodes, of_a_node) + _halving(nodes, of_a_node) + _ring(nodes, of_a_node)


_NCCL_RING = (6.6, 0.6, 2.7, 0.5), (14.0, 1.9, 4.0, 0.92), (8.4, 3.4, 14.0, 1.0)
_NCCL_TREE = (6.8, 0.6, 5.0, 0.92 / 3.8), (14.0, 1.25, 8.5, 0.92 * 0.92), (8.4, 4.0, 14.0, 0.92)
"""A protocol each (LL, LL128, Simple): microseconds of the start, a hop over NVLink, a hop over the network; and the
share of the link's bandwidth. They are those of NCCL's tuning model (NVIDIA/nccl, src/graph/tuning.cc)."""


def _nccl_ring(nodes: int, of_a_node: int, turns: int) -> tuple[Line, ...]:
    """A ring of NCCL by each protocol: start + turns ((n-m) NVLink + (m-1) network + (n-1)/n M / share), m nodes.

    An allreduce goes around twice, a reduce-scatter or an all-gather once (``ncclTopoTuneModel``). The link's latency
    is that of LL's hop: alpha counts in these.
    """
    n, across = nodes * of_a_node, nodes - 1
    hop_us, part = _NCCL_RING[0][1 if nodes == 1 else 2], (n - 1) / n
    return tuple(
        Line(
            (start + turns * ((n - nodes) * inside + across * network)) / hop_us, turns * part / share, turns * part / 2
        )
        for start, inside, network, share in _NCCL_RING
    )


def _nccl(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    """NCCL's ring and tree by each protocol, the lowest of which its tuning model chooses.

    tree: start + 2((n/m-1) NVLink + log2(m) network) + 2 M / share, m nodes.
    """
    hop_us = _NCCL_RING[0][1 if nodes == 1 else 2]
    tree = [
        Line((start + 2 * ((of_a_node - 1) * inside + math.log2(nodes) * network)) / hop_us, 2 / share, 1.0)
        for start, inside, network, share in _NCCL_TREE
    ]
    return (*_nccl_ring(nodes, of_a_node, 2), *tree)


def half_lines(algorithm: Algorithm, nodes: int, of_a_node: int) -> tuple[Line, ...]:
    """Return the cost of a reduce-scatter or an all-gather, as ``Algorithm.lines`` is that of an allreduce.

    Each is half of the allreduce; but NCCL has no tree for them, and its ring's start is not halved.
    """
    if algorithm.name == NCCL:
        return _nccl_ring(nodes, of_a_node, 1)
    return tuple(
        line._replace(**{name: getattr(line, name) / 2 for name in Line._fields if name != "senders"})
        for line in algorithm.lines(nodes, of_a_node)
    )


def _hierarchical(nodes: int, of_a_node: int) -> tuple[Line, ...]:
    m, k = nodes, of_a_node
    across, inside = (m - 1) / m / k, (k - 1) / k
    return (Line(2 * (m - 1), 2 * across, across, 2 * (k - 1), 2 * inside, inside, senders=k),)


def _log2_rounds(each: int) -> Callable[[int, int], int]:
    def rounds(nodes: int, of_a_node: int) -> int:
        log2, _, extra = _fold(nodes * of_a_node)
        return each * log2 + 2 * extra

    return rounds


def _always(count: int) -> Callable[[int, int], int]:
    return lambda nodes, of_a_node: count


_in_memory = partial(Algorithm, place="shared memory", sixteen_bits=True, sixteen_bit_messages=False, steps=None)
_by_messages = partial(Algorithm, place="messages", sixteen_bit_messages=True, steps=None)
_of_a_library = partial(Algorithm, rounds=_always(1), sixteen_bit_messages=True, steps=None)

# The formulas are those of Thakur, Rabenseifner and Gropp 2005. Where n is no power of two, the logarithmic algorithms
# fold the other ranks in first and send them the sums last.
for _algorithm in (
    _in_memory(
        name="auto",
        summary="the fastest by size: in shared memory, one-shot or two-shot",
        lines=_library,
        rounds=_always(2),
        has_reduce_scatter=True,
    ),
    _in_memory(
        name="one-shot",
        summary="in shared memory, every rank adds everything",
        lines=_one_shot,
        rounds=_always(1),
        has_reduce_scatter=False,
    ),
    _in_memory(
        name="two-shot",
        summary="in shared memory, every rank adds a slice",
        lines=_ring,
        rounds=_always(2),
        has_reduce_scatter=True,
    ),
    _of_a_library(
        name="mpi",
        summary="the MPI library's own",
        place="library",
        lines=_library,
        sixteen_bits=False,
        has_reduce_scatter=False,
    ),
    _by_messages(
        name="ring",
        summary="2(n-1) rounds of chunks around a ring",
        lines=_ring,
        rounds=lambda nodes, of_a_node: 2 * (nodes * of_a_node - 1),
        sixteen_bits=False,
        has_reduce_scatter=True,
    ),
    _by_messages(
        name="recursive-doubling",
        summary="log2(n) exchanges of everything",
        lines=_doubling,
        rounds=_log2_rounds(1),
        sixteen_bits=False,
        has_reduce_scatter=False,
    ),
    _by_messages(
        name="halving-doubling",
        summary="2 log2(n) exchanges of halves",
        lines=_halving,
        rounds=_log2_rounds(2),
        sixteen_bits=False,
        has_reduce_scatter=False,
    ),
    _by_messages(
        name="direct",
        summary="2 rounds, slice j by rank j",
        lines=_ring,
        rounds=_always(2),
        sixteen_bits=True,
        has_reduce_scatter=True,
    ),
    _by_messages(
        name="hierarchical",
        summary="inside each node, then a slice a device between the nodes",
        lines=_hierarchical,
        rounds=lambda nodes, of_a_node: sum(2 for members in (nodes, of_a_node) if members > 1),
        sixteen_bits=True,
        sixteen_bit_messages=False,
        has_reduce_scatter=False,
    ),
    _of_a_library(
        name=NCCL,
        summary="NCCL's own: it runs on GPUs, and is priced from the tables of nccl-tests",
        place="elsewhere",
        lines=_nccl,
        sixteen_bits=True,
        has_reduce_scatter=True,
    ),
    Algorithm(
        name="gloo",
        summary="gloo's own, as PyTorch's DDP and FSDP run it; dpsim prices it",
        place="elsewhere",
        lines=_ring,
        rounds=_always(1),
        sixteen_bits=False,
        sixteen_bit_messages=True,
        has_reduce_scatter=True,
        steps=None,
    ),
):
    ALGORITHMS.register(_algorithm)
ALGORITHMS.close()
