"""``doctor``: what works on this machine, found out by doing it."""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpsim import codec, processor
from dpsim.choices import Choices
from dpsim.codec import Noun
from dpsim.errors import DpsimError
from dpsim.harness.measurement import environment
from dpsim.launch import hosts, jobs, rank_info
from dpsim.launch.rank_process import THREAD_VARIABLES
from dpsim.progress import Progress
from dpsim.runtime import choice_file
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
"""Models and pictures whose operations ``tune`` measures, besides those measured before."""
_JOB_KEYS = {"Slurm": "SLURM_JOB_ID", "PBS": "PBS_JOBID"}


class Finding(Noun, frozen=True):
    """One thing that was tried. ``remedy`` says what to do where it does not work as it should."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def examine(progress: Progress) -> Iterator[Finding]:
    """Try one thing after another. A probe that breaks becomes a finding, not an error."""
    for name, probe in (
        ("launcher", _launcher),
        ("MPI", _mpi),
        ("numba", _numba),
        ("BLAS", _blas),
        ("shared memory", _shared_memory),
        ("cores", _cores),
        ("clock", _clock),
        ("kernels", _kernels),
        ("GPU", _gpu),
    ):
        progress(f"trying {name}")
        yield probe()


def add_ranks(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The task of the MPI probe: the sum of rank + 1 over the ranks, and which library added them."""
    from mpi4py import MPI

    library = MPI.Get_library_version().replace("\0", "").splitlines()[0]
    hosts = set(comm.allgather(MPI.Get_processor_name()))
    return {"sum": comm.allreduce(comm.rank + 1), "library": " ".join(library.split()), "hosts": len(hosts)}


def _launcher() -> Finding:
    here = rank_info.job()
    if here is not None:
        found = f"inside a job of {here.launcher}, {here.size} ranks; {_schedulers()}"
        return Finding(name="launcher", state="ok", found=found)
    path = jobs.mpiexec_path()
    if path is None:
        remedy = "pip install 'dpsim[mpich]'"
        return Finding(name="launcher", state="fail", found="no mpiexec beside this Python or on PATH", remedy=remedy)
    try:
        flavour = jobs.mpiexec_flavour(path)
        chosen = hosts.selected(1)
    except DpsimError as error:
        return Finding(name="launcher", state="fail", found=error.given, remedy=error.remedy)
    version = environment.launcher() if flavour != "unknown" else flavour
    listed = f"; hosts {', '.join(f'{host.name}:{host.slots}' for host in chosen)}" if chosen else ""
    return Finding(name="launcher", state="ok", found=f"{version}: {path}{listed}; {_schedulers()}")


def _schedulers() -> str:
    """What of Slurm and PBS is here, and whether this is a job of theirs."""
    present = [name for name in ("srun", "sbatch", "qsub") if shutil.which(name) is not None]
    inside = [f"{name} job {os.environ[key]}" for name, key in _JOB_KEYS.items() if key in os.environ]
    return f"{', '.join(present) or 'no srun, sbatch or qsub'}; {'in ' + inside[0] if inside else 'in no batch job'}"


def _mpi() -> Finding:
    start_s = time.monotonic()
    try:
        told = jobs.on_ranks("dpsim.harness.doctor:add_ranks", {}, devices=RANKS, timeout_s=60)
    except DpsimError as error:
        remedy = error.remedy or "look at what the ranks printed"
        return Finding(name="MPI", state="fail", found=error.given, remedy=remedy)
    expected = RANKS * (RANKS + 1) // 2
    if told["sum"] != expected:
        found = f"{RANKS} ranks added up to {told['sum']} instead of {expected}"
        return Finding(name="MPI", state="fail", found=found, remedy="install the MPI library again")
    took = format_duration(time.monotonic() - start_s)
    return Finding(name="MPI", state="ok", found=f"{told['library']}: {RANKS} ranks added numbers, {took} with start")


def _numba() -> Finding:
    try:
        import numba
        import numpy as np

        from dpsim.kernels import cache, jit

        start_s = time.monotonic()
        total = numba.njit(_total)(np.arange(10.0))
    except Exception as error:  # whatever breaks here is what the user came to hear
        found = f"does not compile: {type(error).__name__}: {error}"
        return Finding(name="numba", state="fail", found=found, remedy="pip install --upgrade numba numpy")
    if total != 45.0:
        return Finding(name="numba", state="fail", found="computes wrongly", remedy="pip install --upgrade numba")
    took = format_duration(time.monotonic() - start_s)
    if not jit.keeps() or cache.folder() is None:
        return Finding(
            name="numba",
            state="warn",
            found="no folder can be written to: every process compiles for itself",
            remedy="name folders: NUMBA_CACHE_DIR=FOLDER DPSIM_CACHE_DIR=FOLDER, or set HOME",
        )
    return Finding(name="numba", state="ok", found=f"{numba.__version__}: compiled and ran a kernel in {took}")


def _total(values: Any) -> float:
    total = 0.0
    for value in values:
        total += value
    return total


def _blas() -> Finding:
    found = processor.blas()
    if forced := os.environ.get("OPENBLAS_CORETYPE"):
        return Finding(
            name="BLAS",
            state="warn",
            found=f"{found}, forced by OPENBLAS_CORETYPE={forced}",
            remedy="unset OPENBLAS_CORETYPE, unless you mean it: it changes speed up to twofold, and bits",
        )
    if found == "unknown":
        return Finding(name="BLAS", state="warn", found="not recognised", remedy="use NumPy's own wheels")
    set_by_user = [f"{name}={os.environ[name]}" for name in THREAD_VARIABLES if name in os.environ]
    threads = ", ".join(set_by_user) or "1 thread a rank"
    return Finding(name="BLAS", state="ok", found=f"{found}; {threads}")


def _shared_memory() -> Finding:
    """Really writes: a container's /dev/shm may be smaller than it looks."""
    name = "shared memory"
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding(name=name, state="warn", found="there is no /dev/shm", remedy="mount a tmpfs there")
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="dpsim-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, SHARED_PROBE_BYTES)
            with mmap.mmap(file.fileno(), SHARED_PROBE_BYTES) as memory:
                for start in range(0, SHARED_PROBE_BYTES, mmap.PAGESIZE):
                    memory[start] = 1
    except OSError as error:
        wanted = format_size(SHARED_PROBE_BYTES)
        free = os.statvfs(folder)
        return Finding(
            name=name,
            state="warn",
            found=f"cannot write {wanted}: {error.strerror}; {format_size(free.f_bavail * free.f_frsize)} are free",
            remedy="in a container: --shm-size=1g; also remove old /dev/shm/mpich_shm_* files of killed jobs",
        )
    size = os.statvfs(folder)
    found = f"wrote {format_size(SHARED_PROBE_BYTES)} of {format_size(size.f_blocks * size.f_frsize)} in /dev/shm"
    return Finding(name=name, state="ok", found=found)


def _cores() -> Finding:
    usable, present = environment.cores(), os.cpu_count() or 1
    load = os.getloadavg()[0]
    found = f"{usable} of {present} usable, load {load:.1f}"
    if usable < RANKS:
        remedy = "two devices on one core measure waiting, not training: use a machine with two cores or more"
        return Finding(name="cores", state="warn", found=found, remedy=remedy)
    if load > 0.5 * present:
        return Finding(
            name="cores", state="warn", found=found, remedy="others compute here: measure when they are done"
        )
    return Finding(name="cores", state="ok", found=found)


def _clock() -> Finding:
    ticks = [time.perf_counter_ns() for _ in range(2000)]
    steps = [later - earlier for earlier, later in itertools.pairwise(ticks) if later > earlier]
    resolution_s = min(steps, default=10**9) * 1e-9
    found = f"resolves {format_duration(resolution_s)}"
    if resolution_s > 1e-6:
        remedy = "small allreduces take 2 us: this clock is too coarse for them"
        return Finding(name="clock", state="warn", found=found, remedy=remedy)
    return Finding(name="clock", state="ok", found=found)


def _kernels() -> Finding:
    """What was measured here: which code computes an operation of a network in plain training."""
    kept = choice_file.path(environment.blas_threads())
    folder = None if kept is None else next((one for one in kept.parents if one.exists()), None)
    if kept is None or folder is None or not os.access(folder, os.W_OK):
        where = "there is no folder for caches" if kept is None else f"{kept.parent} cannot be written"
        found = f"{where}: every run compiles and measures again"
        remedy = "name a folder of your own with DPSIM_CACHE_DIR"
        return Finding(name="kernels", state="warn", found=found, remedy=remedy)
    choices = choices_of_ranks()
    if not choices.kernels:
        found = "nothing measured yet: the first training of a network does it, or dpsim doctor --tune"
        return Finding(name="kernels", state="ok", found=found)
    names = Counter(choice.candidate for choice in choices.kernels)
    counted = ", ".join(f"{name} {count}" for name, count in names.most_common())
    found = f"{len(choices.kernels)} operations measured on {choices.measured_on}; the fastest: {counted}"
    return Finding(name="kernels", state="ok", found=found)


def choices_of_ranks() -> Choices:
    """What was measured on ranks that dpsim starts here."""
    return choice_file.load(environment.blas_threads())


def tune(progress: Progress) -> Choices:
    """Measure anew, on as many ranks as a machine with two cores can keep busy, which code is the fastest."""
    ranks = min(RANKS, environment.cores())
    task, networks = "dpsim.harness.calibrate.choices_on_ranks:tune_on_ranks", {"networks": TUNED_NETWORKS}
    measured = jobs.on_ranks(task, networks, devices=ranks, progress=progress, pin=True)
    return codec.decode(measured, Choices, "choices")


def _gpu() -> Finding:
    """A real allocation and addition with whichever of CuPy and numba-cuda is installed. None is needed."""
    if environment.version("cupy-cuda13x") == "none" and environment.version("numba-cuda") == "none":
        return Finding(name="GPU", state="ok", found="not used: neither CuPy nor numba-cuda is installed")
    try:
        from numba import cuda as untyped

        cuda: Any = untyped
        if not cuda.is_available():
            return Finding(name="GPU", state="ok", found="none found; everything runs on the CPU")
        import numpy as np

        sent = cuda.to_device(np.arange(8.0))
        same = bool((sent.copy_to_host() == np.arange(8.0)).all())
        name = cuda.get_current_device().name
        label = name.decode() if isinstance(name, bytes) else str(name)
    except Exception as error:  # drivers fail in many ways, and none of them matters to the CPU
        found = f"does not work: {type(error).__name__}: {error}"
        return Finding(name="GPU", state="warn", found=found, remedy="see nvidia-smi; the CPU is used meanwhile")
    state: Literal["ok", "warn"] = "ok" if same else "warn"
    return Finding(name="GPU", state=state, found=f"{label}, copies {'come back' if same else 'come back changed'}")
