"""Which combinations of a plan's fields, of its network, backend and runtime are impossible, and why: one table.

``Plan`` checks the rows of its own fields; ``check`` those of some fields, where there is no plan yet, or of a network,
a backend or a runtime; ``possible`` answers without an error, so that what compares many combinations leaves the
impossible ones out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, Literal, get_args

from dpsim.algorithms import ALGORITHMS, BACKENDS, CUDA_VERSIONS, NCCL, RUNNABLE, SIXTEEN_BIT_VERSION, algorithms_in
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import unknown
from dpsim.plan_constraints import CONSTRAINTS, Constraint, asynchronous_with, strategy_of
from dpsim.processor import layers_by_kernels
from dpsim.strategy import ASYNCHRONOUS, ZERO_REDUNDANCY, DataParallel, fully_sharded, parse_strategy

Runtime = Literal["dpsim", "torch-ddp-gloo", "torch-ddp-mpi", "torch-ddp-nccl", "torch-fsdp-gloo", "torch-ddp-hook"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)
"""``torch-ddp-gloo`` is DDP with gloo's own allreduces, ``torch-ddp-mpi`` DDP with a communication hook that reduces
each bucket over dpsim's MPI transports, ``torch-ddp-nccl`` DDP with NCCL's allreduces, on one GPU a rank.
``torch-fsdp-gloo`` is ``fully_shard`` with gloo's all-gathers and reduce-scatters. ``torch-ddp-hook`` is DDP with
``dpsim.torch.allreduce_hook()``: it is measured beside gloo, whose plan it has, and not predicted."""
FSDP: Runtime = "torch-fsdp-gloo"
HOOK: Runtime = "torch-ddp-hook"
LIBRARIES: dict[str, str] = {"torch-ddp-gloo": "gloo", "torch-ddp-nccl": "nccl", FSDP: "gloo", HOOK: "gloo"}
"""The runtimes that communicate by a library of their own, and the algorithm that stands for it."""
DDP_OVERLAPS: dict[str, tuple[str, ...]] = {
    "torch-ddp-gloo": ("thread",),
    "torch-ddp-mpi": ("inline", "thread"),
    "torch-ddp-nccl": ("thread",),
    FSDP: ("inline",),
    HOOK: ("thread",),
}
"""When DDP communicates: gloo has threads of its own and NCCL a stream; a hook waits, or has a thread do it. On
processors FSDP waits for each of its collectives."""


def _cannot_be_held_to_a_link(place: str, run: Any) -> bool:
    network = run.network
    return (network.emulated if place == "shared memory" else network.paced) and _place(run) == place


def _place(run: Any) -> str:
    """Where an algorithm runs; between hosts ``auto`` is the MPI library's own or one of dpsim's by messages."""
    if run.network.shaped and run.algorithm == "auto":
        return "library"
    return str(ALGORITHMS.find(run.algorithm).place)


NETWORK_CONSTRAINTS = (
    Constraint(
        "strategy network",
        lambda run: strategy_of(run).asynchronous and bool(run.network.emulated),
        "strategy {strategy} on {network}: devices share parameters in memory, and send no messages",
        "--network node",
        "leave --network out, or choose another --strategy",
    ),
    Constraint(
        "algorithm network",
        lambda run: run.algorithm == NCCL,
        "algorithm {algorithm!r} runs only with --backend cuda",
        ", ".join(algorithms_in(*RUNNABLE)),
        "train on GPUs with --backend cuda, or choose another one with --algorithm",
    ),
    Constraint(
        "algorithm network",
        lambda run: ALGORITHMS.find(run.algorithm).place == "elsewhere",
        "algorithm {algorithm!r} is priced from imported tables, and cannot be run here",
        ", ".join(algorithms_in(*RUNNABLE)),
        "use it with dpsim predict, and choose another one with --algorithm here",
    ),
    *(
        Constraint(
            "algorithm network",
            functools.partial(_cannot_be_held_to_a_link, place),
            f"algorithm {{algorithm!r}} cannot run on {{network}}: {why}",
            lambda run: ", ".join([*["auto", "mpi"] * run.network.shaped, *algorithms_in("messages")]),
            "choose one of them with --algorithm, or use --network node",
        )
        for place, why in (
            ("library", "the MPI library hides its messages from it"),
            ("shared memory", "it sends no messages"),
        )
    ),
    Constraint(
        "devices network",
        lambda run: run.network.shaped and run.devices > run.network.hosts,
        "{devices} devices on {network}",
        lambda run: f"1 to {run.network.hosts} devices: each is a host",
        "give the network more hosts, or train on fewer devices",
    ),
    Constraint(
        "layout network",
        lambda run: run.network.shaped and bool(run.layout),
        "layout {layout} on {network}, each of whose hosts has one device",
        "a number of devices",
        "give --devices a number",
    ),
)
"""What dpsim cannot run on a CPU; on an emulated network, whatever sends no messages that can be held to the link."""


def _on_gpus(fields: str, impossible: Callable[[Any], bool], given: str, allowed: str, remedy: str) -> Constraint:
    return Constraint(
        f"backend {fields}", lambda run: run.backend == "cuda" and impossible(run), given, allowed, remedy
    )


BACKEND_CONSTRAINTS = (
    _on_gpus(
        "network",
        lambda run: run.network.emulated,
        "backend 'cuda' on {network}: its kernels use the memory of GPUs, not an emulated network",
        "--network node",
        "leave --network out, or use --backend cpu",
    ),
    _on_gpus(
        "strategy",
        lambda run: run.strategy != "data-parallel",
        "strategy {strategy} on backend 'cuda', whose kernels add up whole gradients",
        "strategy data-parallel on it",
        "leave --strategy out, or use --backend cpu",
    ),
    _on_gpus(
        "algorithm leaves",
        lambda run: run.algorithm == NCCL and run.leaves > 0,
        "algorithm nccl with leaves: NCCL adds in an order that changes with the number of GPUs",
        f"{', '.join(CUDA_VERSIONS)} in reproducible training",
        "leave --algorithm out: between machines NCCL then moves gradients, and dpsim's kernel adds them",
    ),
    _on_gpus(
        "algorithm wire_dtype",
        lambda run: run.algorithm == NCCL and run.wire_dtype in SIXTEEN_BITS,
        "algorithm nccl with wire dtype {wire_dtype}: NCCL would add in 16 bits",
        f"{', '.join(CUDA_VERSIONS)} with 16 bits, which add in float32",
        "leave --algorithm out",
    ),
    _on_gpus(
        "algorithm",
        lambda run: run.algorithm not in (*CUDA_VERSIONS, NCCL),
        "algorithm {algorithm!r} has no CUDA kernel",
        ", ".join((*CUDA_VERSIONS, NCCL)),
        "choose one of them with --algorithm (auto is the usual one), or use --backend cpu",
    ),
    _on_gpus(
        "algorithm wire_dtype",
        lambda run: run.wire_dtype in SIXTEEN_BITS and CUDA_VERSIONS.get(run.algorithm) != SIXTEEN_BIT_VERSION,
        "algorithm {algorithm!r} with wire dtype {wire_dtype} on backend 'cuda': its kernel sends no 16 bits",
        ", ".join(name for name, version in CUDA_VERSIONS.items() if version == SIXTEEN_BIT_VERSION),
        "leave --algorithm out, or use --backend cpu",
    ),
)
"""What kernels on GPUs cannot do."""


def _by_ddp(name: str, values: Callable[[Any], tuple[object, ...]], more_fields: str = "") -> Constraint:
    return Constraint(
        f"runtime {name} {more_fields}",
        lambda run: run.runtime != "dpsim" and getattr(run, name) not in values(run),
        f"{name} is {{{name}}} with the runtime {{runtime}}",
        lambda run: ", ".join("none" if each in (None, "") else str(each) for each in values(run)),
        f"choose one of these for {name}, or another runtime",
    )


def _ddp_algorithms(run: Any) -> tuple[object, ...]:
    library = LIBRARIES.get(run.runtime)
    return (library,) if library else (run.algorithm,) if run.network.paced else ("mpi",)


def _ddp_strategies(run: Any) -> tuple[object, ...]:
    sharded = run.runtime == FSDP
    own = fully_sharded(parse_strategy(run.strategy).replicas)
    by_library = [ZERO_REDUNDANCY] * (not sharded and run.runtime in LIBRARIES)
    return (*[own] * sharded, *[DataParallel.name] * (not sharded or run.devices == 1), *by_library)


RUNTIME_CONSTRAINTS = (
    _by_ddp("fusion_rule", lambda run: ("fsdp", "per-tensor") if run.runtime == FSDP else ("ddp",)),
    _by_ddp("overlap", lambda run: (*DDP_OVERLAPS[run.runtime], *["off"] * (run.devices == 1)), "devices"),
    _by_ddp("strategy", _ddp_strategies, "devices"),
    _by_ddp("leaves", lambda run: (0,)),
    _by_ddp("layout", lambda run: ("",)),
    _by_ddp("wire_dtype", lambda run: (None,)),
    _by_ddp("compute_dtype", lambda run: ("float32",)),
    _by_ddp("compute", lambda run: ("real",)),
    Constraint(
        "runtime network",
        lambda run: run.runtime in LIBRARIES and run.network.paced,
        "network is {network} with the runtime {runtime}",
        "node, or shaped:HOSTSxBANDWIDTH",
        "choose one of these for network, or another runtime",
    ),
    _by_ddp("algorithm", _ddp_algorithms, "network"),
)
"""What PyTorch's DDP does not do, or not in this way."""


def _emulated(field: str, only: object) -> Constraint:
    return Constraint(
        f"compute {field}",
        lambda run: run.compute == "emulated" and getattr(run, field) != only,
        f"{field} is {{{field}}} with emulated compute, of which no layer's time is known alone",
        f"{field} {only}",
        "compute for real, on as many devices as there are cores",
    )


EMULATION_CONSTRAINTS = (
    Constraint(
        "compute network",
        lambda run: run.compute == "emulated" and not run.network.emulated,
        "emulated compute on the network {network}, where more ranks than cores would time the cores",
        "an emulated network: paced:LATENCY,BANDWIDTH or shaped:HOSTSxBANDWIDTH",
        "give a link such as --network paced:500us,100mbit, or compute for real",
    ),
    _emulated("leaves", 0),
)
"""What ranks that wait instead of computing could not be told from ranks that compute in."""

TRAINING_CONSTRAINTS = (
    Constraint(
        "strategy record",
        lambda run: run.record is not None and not strategy_of(run).asynchronous,
        "the order of updates of strategy {strategy}, which is always the same",
        f"a record of {' or '.join(ASYNCHRONOUS)}",
        f"leave --record out, or choose --strategy {' or '.join(ASYNCHRONOUS)}",
    ),
    Constraint(
        "replay record",
        lambda run: run.replay is not None and run.record is not None,
        "a record of a run that replays a record",
        "one of them",
        "leave --record out",
    ),
    *(
        Constraint(
            f"strategy {field} record",
            functools.partial(asynchronous_with, field, None),
            f"strategy {{strategy}} with {field}: at no moment has every device ended the same step",
            f"no {field}",
            f"leave --{field} out, or choose another --strategy",
        )
        for field in ("checkpoint", "resume")
    ),
)
"""What a training cannot do; all name ``record``, so that ``check("record", ...)`` finds them."""

ALL_CONSTRAINTS = (
    *CONSTRAINTS,
    *NETWORK_CONSTRAINTS,
    *BACKEND_CONSTRAINTS,
    *RUNTIME_CONSTRAINTS,
    *EMULATION_CONSTRAINTS,
    *TRAINING_CONSTRAINTS,
)


def _rows(names: set[str], of: str = "") -> Iterator[Constraint]:
    """The constraints of nothing but these fields, and of field ``of`` if one is named."""
    return (row for row in ALL_CONSTRAINTS if names >= {*row.fields.split()} and (not of or of in row.fields.split()))


def check_plan(plan: Any, rows: Iterable[Constraint] = CONSTRAINTS) -> None:
    """Raise ``ConfigError`` if a plan has an impossible combination."""
    for row in rows:
        if row.impossible(plan):
            raise row.error(plan)


def check(of: str = "", **fields: Any) -> None:
    """Raise ``ConfigError`` if these values are impossible together; constraints of other fields do not count.

    With ``of`` only those of that field count: ``network`` and ``algorithm`` for what dpsim cannot run there on a CPU,
    ``backend``, ``runtime``, ``compute``, ``record``. A ``network`` is a ``dpsim.machine.Network``.
    """
    check_plan(SimpleNamespace(**fields), _rows(set(fields), of))


def check_backend(backend: str, plan: Any, network: Any) -> None:
    """Raise ``ConfigError`` for a backend that does not exist, or that cannot run a plan on a network."""
    if backend not in BACKENDS:
        raise unknown("backend", backend, BACKENDS)
    if backend == "cuda":
        layers_by_kernels()
    check("backend", backend=backend, network=network, **{name: getattr(plan, name) for name in plan.__struct_fields__})


def possible(of: str, **fields: Any) -> bool:
    """Return whether no constraint of field ``of`` refuses these values together."""
    return not any(row.impossible(SimpleNamespace(**fields)) for row in _rows(set(fields), of))
