"""What gpu_check finds before it measures: the driver, CUDA's libraries, NCCL, MPI and pytest, each with a remedy.

A probe that fails stops only the parts that need it (``parts``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from pathlib import Path

from dpsim import installation
from dpsim.comm.cuda.available import cupy_version, simulating
from dpsim.comm.cuda.driver import Driver
from dpsim.errors import DpsimError
from dpsim.experiments.gpu_check.libraries import GROUPS
from dpsim.experiments.gpu_check.record import Gpus, Probe
from dpsim.launch import child_process, jobs, rank_info
from dpsim.progress import Progress
from dpsim.study.environment import version

PROBE_S = 90.0
"""At most, in seconds, for the libraries of a group; the first import from a cold disk is slow."""
_MPI_S = 60.0
_TEST_MODULES = ("pytest", "pytest_timeout", "hypothesis", "safetensors", "scipy")
_TOOLKIT_VARIABLES = ("CUDA_HOME", "CUDA_PATH")
_IN_TOOLKITS = ("NVVM", "cudadevrt")
_KNOWN = {
    "module 'numpy' has no attribute": f"numba-cuda does not work with NumPy {version('numpy')}:"
    " pip install 'numpy<2.5', or add its wheel to WHEELS",
    "DEVICE_UNAVAILABLE": "another process has the GPU, whose compute mode lets only one at a time: wait for its end",
    "OUT_OF_MEMORY": "other processes have the GPU's memory: nvidia-smi lists them; wait for their end",
}
"""What to do, by what the reason of a failure contains."""

_NVVM = "nvvm/lib*/libnvvm.so*"

Run = Callable[[str], tuple[Probe, ...]]
"""Returns the probes of a group of ``libraries.GROUPS``."""
_DRIVER = Path("/proc/driver/nvidia/version")


def gpus(driver: Driver) -> Gpus:
    """Return the GPUs of the driver, and the packages that use them. Creates no CUDA context."""
    simulated = simulating()
    return Gpus(
        names=("numba's CUDA simulator",) if simulated else tuple(gpu.name for gpu in driver.gpus),
        driver="none" if simulated else kernel_driver(),
        cuda="none" if simulated else f"driver {driver.cuda}",
        numba_cuda=version("numba-cuda"),
        cupy=cupy_version(),
        simulated=simulated,
    )


def kernel_driver() -> str:
    """Return the kernel driver's version, like 580.95.05; ``unknown`` where the kernel does not tell."""
    text = _DRIVER.read_text(encoding="utf-8") if _DRIVER.exists() else ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match.group() if match else "unknown"


def probe_all(driver: Driver, known: Callable[[Probe], None], tell: Progress) -> None:
    """Probe everything, and give ``known`` each probe as soon as it is made. Without a usable GPU nothing is tried."""
    known(probe_driver(driver))
    if driver.problem:
        return

    def run(group: str) -> tuple[Probe, ...]:
        return probe_libraries(group, driver)

    for probe in probe_numba(driver, run, os.environ, tell):
        known(probe)
    for probe in run("cupy"):
        known(probe)
    known(probe_mpi())
    known(probe_pytest())


def probe_driver(driver: Driver) -> Probe:
    """Return the driver's CUDA and its GPUs; what keeps processes from sharing them."""
    if not driver.problem:
        return Probe(name="driver", works=True, text=driver.description)
    remedy = f"install an NVIDIA driver for CUDA {driver.cuda if driver.cuda_version else 12} or newer; see nvidia-smi"
    return Probe(name="driver", works=False, text=driver.problem, remedy=remedy)


def probe_libraries(
    group: str, driver: Driver, command: Sequence[str] = (), timeout_s: float = PROBE_S
) -> tuple[Probe, ...]:
    """Probe the libraries of a group, in a process of their own: after the first that fails, the others are not tried.

    ``command`` runs in place of ``libraries``.
    """
    command = command or (sys.executable, "-W", "ignore", "-m", "dpsim.experiments.gpu_check.libraries", group)
    try:
        done = child_process.run(command, timeout_s=timeout_s, env=alone(os.environ))
        out, reason = done.stdout, error_line(done.stderr) or f"exit code {done.returncode}"
        if done.returncode < 0:
            reason = f"killed by signal {-done.returncode}"
    except subprocess.TimeoutExpired as error:
        out = error.output.decode(errors="replace") if isinstance(error.output, bytes) else error.output or ""
        reason = f"no answer after {timeout_s:.0f} s"
    known = dict(text.split("\t", 1) for text in out.splitlines() if "\t" in text)
    probes: list[Probe] = []
    failing = ""
    for name in GROUPS[group][0]:
        if failing:
            probes.append(Probe(name=name, works=False, text=f"not tried, because {failing} fails"))
        elif name in known:
            probes.append(Probe(name=name, works=True, text=known[name]))
        else:
            failing, fix = name, remedy(name, driver, reason)
            probes.append(Probe(name=name, works=False, text=without_folders(reason), remedy=fix))
    return tuple(probes)


def alone(variables: MutableMapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that must not take itself for a rank of this process's job."""
    launchers = ("PMI_", "PMIX_", "OMPI_", "SLURM_", "HYD", "MPIR_", "MPI_LOCAL")
    return {name: value for name, value in variables.items() if not name.startswith(launchers)}


def probe_numba(
    driver: Driver, run: Run, variables: MutableMapping[str, str], tell: Progress, folders: Iterable[Path] | None = None
) -> tuple[Probe, ...]:
    """Probe numba-cuda and the libraries that it needs. A CUDA toolkit is tried where they are missing.

    numba-cuda does not search for NVVM where NVRTC comes from a wheel (beside PyTorch, for instance). If a toolkit in
    ``folders`` helps, ``variables`` gets CUDA_HOME for the rest of this run.
    """
    probes = run("numba")
    failing = next((probe.name for probe in probes if not probe.works), "")
    if failing not in _IN_TOOLKITS or any(variables.get(name) for name in _TOOLKIT_VARIABLES):
        return probes
    for home in toolkits(driver, _usual_folders() if folders is None else folders):
        variables["CUDA_HOME"] = str(home)
        again = run("numba")
        if sum(probe.works for probe in again) > sum(probe.works for probe in probes):
            tell(f"CUDA_HOME={home} is set for this run; numba-cuda fails without it")
            return again
        del variables["CUDA_HOME"]
    return probes


def _usual_folders() -> list[Path]:
    compiler = shutil.which("nvcc")
    own = [] if compiler is None else [Path(compiler).resolve().parents[1]]
    return [*own, *sorted(Path("/usr/local").glob("cuda*")), *sorted(Path("/opt").glob("cuda*"))]


def toolkits(driver: Driver, folders: Iterable[Path]) -> list[Path]:
    """Return the folders with a CUDA toolkit whose NVVM this driver can use: those of the driver's own CUDA first."""
    major = driver.cuda_version // 1000
    usable = {folder.resolve(): _major(folder) for folder in folders if any(folder.glob(_NVVM))}
    return sorted((folder for folder in usable if usable[folder] <= major), key=lambda folder: -usable[folder])


def _major(folder: Path) -> int:
    """Return the major version of a toolkit; 0 where the toolkit does not state it."""
    try:
        version = json.loads((folder / "version.json").read_text(encoding="utf-8"))["cuda"]["version"]
        return int(version.split(".")[0])
    except (OSError, ValueError, KeyError, TypeError):
        match = re.search(r"cuda-(\d+)", folder.resolve().name)
        return int(match[1]) if match else 0


def probe_mpi() -> Probe:
    """Start two ranks with mpiexec, or take those of the job that this process is part of, and let them meet."""
    job = rank_info.job()
    devices = 2 if job is None or job.size is None else job.size
    how = "started with mpiexec" if job is None else f"of a job of {job.launcher}"
    try:
        actual = jobs.on_ranks("dpsim.experiments.gpu_check.between:meet", {}, devices=devices, timeout_s=_MPI_S)
    except DpsimError as error:
        fix = error.remedy or remedy("MPI", Driver())
        return Probe(name="MPI", works=False, text=without_folders(_one_line(error.given)), remedy=fix)
    if actual["nodes"] > 1:
        text = f"{devices} ranks on {actual['nodes']} machines"
        return Probe(name="MPI", works=False, text=text, remedy="give ranks of one machine: srun -N 1")
    return Probe(name="MPI", works=True, text=f"{actual['library']}; {devices} ranks {how}")


def probe_pytest() -> Probe:
    """Return whether the tests can run in this Python."""
    missing = [name.replace("_", "-") for name in _TEST_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} not installed"
        return Probe(name="pytest", works=False, text=text, remedy=f"pip install {' '.join(missing)}")
    return Probe(name="pytest", works=True, text="installed, with what the tests need")


def why_no_pytorch(*, simulated: bool) -> str:
    """Say why nothing is measured beside PyTorch, as far as it can be said without loading it."""
    if simulated:
        return "PyTorch is not compared with the simulator"
    return "" if importlib.util.find_spec("torch") is not None else "PyTorch is not installed"


def remedy(name: str, driver: Driver, reason: str = "") -> str:
    """Say what to do about a library that fails for ``reason``."""
    if known := next((text for sign, text in _KNOWN.items() if sign in reason), ""):
        return known
    install = f"{installation.install(driver.extra)}, which fits a driver for CUDA {driver.cuda}"
    toolkit = f"pip install '{driver.cupy_package}[ctk]', which fits a driver for CUDA {driver.cuda}"
    return {
        "numba-cuda": install,
        "NVVM": f"set CUDA_HOME to a CUDA toolkit that has nvvm/lib64/libnvvm.so, or {install}",
        "launch": f"use libraries that are not newer than the driver: {install}",
        "cudadevrt": f"set CUDA_HOME to a CUDA toolkit that has lib64/libcudadevrt.a, or {install}",
        "CuPy": toolkit,
        "cuBLAS": toolkit,
        "NCCL": f"pip install {driver.nccl_package}; only the comparison with NCCL needs it",
        "MPI": f"{installation.install('mpich')}, or add its wheels to WHEELS;"
        " only what runs between processes needs it",
    }[name]


def without_folders(text: str) -> str:
    """Return the text without the folders in it, for others to see: a folder may name a user."""
    return re.sub(r"(?<![\w.])/(?:[^\s/'\":,]+/)+", "", text)


def error_line(text: str) -> str:
    """Return the last line that names an error, else the last one: some errors end with the listing of a folder."""
    lines = [each for each in text.splitlines() if each.strip()]
    errors = [each for each in lines if re.match(r"[\w.]*(Error|Exception)\b", each)]
    return _one_line((errors or lines or [""])[-1])


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
