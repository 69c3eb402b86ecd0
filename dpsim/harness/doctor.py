"""``doctor``: what works on this machine, determined by trying it."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim import codec, installation, processor
from dpsim.choices import Choices
from dpsim.errors import ConfigError, DpsimError
from dpsim.harness import doctor_gpu
from dpsim.harness.doctor_gpu import Finding
from dpsim.launch import hosts, jobs, rank_info, scratch
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.launch.shaped.hosts import shaped_hosts
from dpsim.network import Network
from dpsim.progress import Progress
from dpsim.runtime import choice_file
from dpsim.study import environment, other_processes
from dpsim.units import format_duration, format_size

if TYPE_CHECKING:
    from mpi4py import MPI

SHARED_PROBE_BYTES = 128 * 2**20
RANKS = 2
TUNED_NETWORKS = [
    ("mlp:2048,2048,2048", (28, 28, 1)),
    ("resnet20", (32, 32, 3)),
    ("cnn", (8, 8, 1)),
    ("mlp:64x20", (8, 8, 1)),
]
"""Models, and shapes of their input, whose operations ``tune`` measures in addition to those measured before."""
_JOB_KEYS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID"}


def examine(progress: Progress) -> Iterator[Finding]:
    """Run one probe after another. A probe that fails becomes a finding, not an error."""
    yield from _tried(PROBES, progress)
    yield from _tried((("GPU", doctor_gpu.device),), progress)
    if doctor_gpu.usable():
        yield from _tried(doctor_gpu.PROBES, progress)


def _tried(probes: Iterable[tuple[str, Callable[[], Finding]]], progress: Progress) -> Iterator[Finding]:
    for name, probe in probes:
        progress(f"trying {name}")
        yield probe()._replace(name=name)


def add_ranks(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The task of the MPI probe: the sum of rank + 1 over the ranks, and the MPI library that computed it."""
    from mpi4py import MPI

    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    names = set(comm.allgather(MPI.Get_processor_name()))
    return {"sum": comm.allreduce(comm.rank + 1), "library": " ".join(library.split()), "hosts": len(names)}


def _installation() -> Finding:
    """Another program that is named dpsim, too, must not be installed beside this one."""
    if other := installation.other_program():
        return Finding("fail", f"{other} is another program, in the same folder", installation.without_other_program())
    root = installation.checkout()
    return Finding("ok", f"dpsim {installation.VERSION}, {'installed' if root is None else 'from a checkout'}")


def _launcher() -> Finding:
    job = rank_info.job()
    if job is not None:
        return Finding("ok", f"inside a job of {job.launcher}, {job.size} ranks; {_schedulers()}")
    path = jobs.mpiexec_path()
    if path is None:
        return Finding("fail", "no mpiexec next to this Python or on PATH", installation.install("mpich"))
    try:
        flavour = jobs.mpiexec_flavour(path)
        machines = hosts.selected(1)
    except DpsimError as error:
        return Finding("fail", error.given, error.remedy)
    version = environment.launcher() if flavour != "unknown" else flavour
    host_list = f"; hosts {', '.join(f'{host.name}:{host.slots}' for host in machines)}" if machines else ""
    return Finding("ok", f"{version}: {path}{host_list}; {_schedulers()}")


def _schedulers() -> str:
    """Which commands of Slurm and PBS exist, and which batch job this process is part of."""
    present = [name for name in ("srun", "sbatch", "qsub") if shutil.which(name) is not None]
    inside = [f"{name} job {os.environ[key]}" for name, key in _JOB_KEYS.items() if key in os.environ]
    return f"{', '.join(present) or 'no srun, sbatch or qsub'}; {'in ' + inside[0] if inside else 'in no batch job'}"


def _mpi() -> Finding:
    start_s = time.monotonic()
    try:
        answer = jobs.on_ranks("dpsim.harness.doctor:add_ranks", {}, devices=RANKS, timeout_s=60)
    except DpsimError as error:
        return Finding("fail", error.given, error.remedy or "see what the ranks printed")
    expected = RANKS * (RANKS + 1) // 2
    if answer["sum"] != expected:
        text = f"{RANKS} ranks computed the sum {answer['sum']} instead of {expected}"
        return Finding("fail", text, "install the MPI library again")
    duration = format_duration(time.monotonic() - start_s)
    return Finding("ok", f"{answer['library']}: {RANKS} ranks computed a sum in {duration}, start included")


def _shaped_hosts() -> Finding:
    network = (Network.parse("shaped:2x100mbit"),)
    try:
        with scratch.scratch("doctor") as folder, shaped_hosts(network, folder):
            return Finding("ok", "hosts with shaped links can be made: --network shaped:2x1gbit")
    except ConfigError as error:
        return Finding("ok", f"not needed, and not here: {error.given}")


def _numba() -> Finding:
    try:
        import numpy as np

        from dpsim import jit
        from dpsim.kernels import cache

        numba = jit.load_numba()
        start_s = time.monotonic()
        total = numba.njit(_total)(np.arange(10.0))
    except Exception as error:  # whatever fails here is the answer to the user's question
        return Finding(
            "fail", f"does not compile: {type(error).__name__}: {error}", "pip install --upgrade numba numpy"
        )
    if total != 45.0:
        return Finding("fail", "computes a wrong sum", "pip install --upgrade numba")
    duration = format_duration(time.monotonic() - start_s)
    if not jit.keeps() or cache.folder() is None:
        return Finding(
            "warn",
            "there is no writable folder for compiled kernels: every process compiles its own",
            "name folders: NUMBA_CACHE_DIR=FOLDER DPSIM_CACHE_DIR=FOLDER, or set HOME",
        )
    if processor.limited():
        return Finding(
            "warn",
            f"{numba.__version__}: dpsim's own code is limited to AVX2 by {processor.VARIABLE}=avx2",
            f"unset {processor.VARIABLE}, unless it is intended: it changes bits and speed",
        )
    return Finding("ok", f"{numba.__version__}: compiled and ran a kernel in {duration}")


def _total(values: Any) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _blas() -> Finding:
    architecture = processor.blas()
    if forced := os.environ.get("OPENBLAS_CORETYPE"):
        return Finding(
            "warn",
            f"{architecture}, forced by OPENBLAS_CORETYPE={forced}",
            "unset OPENBLAS_CORETYPE, unless it is intended: it changes bits, and speed up to twofold",
        )
    if architecture == "unknown":
        return Finding("warn", "not recognised", "use NumPy's own wheels")
    set_by_user = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    return Finding("ok", f"{architecture}; {', '.join(set_by_user) or '1 thread per rank'}")


def _shared_memory() -> Finding:
    """Writes into /dev/shm, because a container may have less of it than the file system reports."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("warn", "there is no /dev/shm", "mount a tmpfs there")
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="dpsim-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, SHARED_PROBE_BYTES)
            with mmap.mmap(file.fileno(), SHARED_PROBE_BYTES) as memory:
                for start in range(0, SHARED_PROBE_BYTES, mmap.PAGESIZE):
                    memory[start] = 1
    except OSError as error:
        free = os.statvfs(folder)
        return Finding(
            "warn",
            f"cannot write {format_size(SHARED_PROBE_BYTES)}: {error.strerror}; "
            f"{format_size(free.f_bavail * free.f_frsize)} are free",
            "in a container, use --shm-size=1g; also remove old /dev/shm/mpich_shm_* files of killed jobs",
        )
    size = os.statvfs(folder)
    total = format_size(size.f_blocks * size.f_frsize)
    return Finding("ok", f"wrote {format_size(SHARED_PROBE_BYTES)} of {total} in /dev/shm")


def _cores() -> Finding:
    usable, use = environment.cores(), other_processes.look()
    text = f"{usable} of {os.cpu_count() or 1} usable"
    if use is not None:
        text += f"; {use.sentence}"
    if usable < RANKS:
        remedy = "two devices on one core measure waiting, not training: use a machine with two cores or more"
        return Finding("warn", text, remedy)
    if use is not None and use.busy:
        return Finding("warn", text, "measure when they have finished: --wait-until-quiet waits for that")
    return Finding("ok", text)


def _clock() -> Finding:
    ticks = [time.perf_counter_ns() for _ in range(2000)]
    steps = [later - earlier for earlier, later in itertools.pairwise(ticks) if later > earlier]
    resolution_s = min(steps, default=10**9) * 1e-9
    text = f"resolves {format_duration(resolution_s)}"
    if resolution_s > 1e-6:
        return Finding("warn", text, "small allreduces take 2 us: this clock is too coarse to time them")
    return Finding("ok", text)


def _kernels() -> Finding:
    """The code that computes each operation of a network in plain training, as it was measured on this machine."""
    file = choice_file.path(environment.blas_threads())
    folder = None if file is None else next((parent for parent in file.parents if parent.exists()), None)
    if file is None or folder is None or not os.access(folder, os.W_OK):
        reason = "there is no folder for caches" if file is None else f"{file.parent} is not writable"
        return Finding(
            "warn", f"{reason}: every run compiles and measures again", "set DPSIM_CACHE_DIR to a writable folder"
        )
    choices = choices_of_ranks()
    if not choices.kernels:
        return Finding("ok", "not measured yet: the first training of a network does that, or dpsim doctor --tune")
    names = Counter(choice.candidate for choice in choices.kernels)
    counted = ", ".join(f"{name} {count}" for name, count in names.most_common())
    return Finding("ok", f"{len(choices.kernels)} operations measured on {choices.measured_on}; the fastest: {counted}")


def choices_of_ranks() -> Choices:
    """The fastest code of each operation, as measured on ranks that dpsim starts on this machine."""
    return choice_file.load(environment.blas_threads())


def tune(progress: Progress) -> Choices:
    """Measure again which code computes each operation fastest, on ``RANKS`` ranks, or fewer with fewer cores."""
    ranks = min(RANKS, environment.cores())
    task, networks = "dpsim.study.runners.choices:tune_on_ranks", {"networks": TUNED_NETWORKS}
    measured = jobs.on_ranks(task, networks, devices=ranks, progress=progress, pin=True)
    return codec.decode(measured, Choices, "choices")


PROBES = (
    ("installation", _installation),
    ("launcher", _launcher),
    ("MPI", _mpi),
    ("shaped hosts", _shaped_hosts),
    ("numba", _numba),
    ("BLAS", _blas),
    ("shared memory", _shared_memory),
    ("cores", _cores),
    ("clock", _clock),
    ("kernels", _kernels),
)
"""What is tried on every machine, by name."""
