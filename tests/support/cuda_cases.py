"""Cases for the CUDA kernels, in the simulator and on a GPU: what is given, and what the reference makes of it."""

from __future__ import annotations

import itertools
import json
import mmap
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from python_path import extended_path
from wire_reference import node_sum, rounded

from dpsim.comm.cuda.available import why_no_kernels
from dpsim.kernels.allreduce import reference
from dpsim.kernels.allreduce.cuda.launch import Codes, flag_words
from dpsim.kernels.allreduce.tree import PartialSums, slots

Array = Any
VERSIONS = ("ring", "halving-doubling", "one-shot", "two-shot")
DTYPES = ("float16", "bfloat16", "float32", "float64")
BOUNDS = {
    1: [0, 1],
    2: [0, 1, 2],
    3: [0, 1, 2, 3],
    4: [0, 1, 2, 3, 4],
    5: [0, 1, 2, 3, 4, 5],
    8: list(range(9)),
    # ranks that hold several slots: 2 of 3 and 5 leaves, 3 of 3, 2 and 3
    102: [0, 3, 8],
    103: [0, 3, 5, 8],
}
"""Leaves of ranks; below 100: one a rank."""
SIXTEEN_BITS = ("float16", "bfloat16")
EACH_SUM = ("float16, each sum", "bfloat16, each sum")
"""Variants with compression; in those of leaves every sum of two is rounded."""
GUARD = 64
"""Bytes before and after each array that nobody may write."""


@dataclass(frozen=True)
class Case:
    """``ranks``: a key of BOUNDS; ``shifts``: elements by which the slots' arrays start off a multiple of 16 bytes."""

    version: str
    dtype: str
    ranks: int
    length: int
    shifts: tuple[int, ...] = (0,)
    variant: str = "scale"
    apart: bool = False
    scale: float = 1.0

    @property
    def wire_dtype(self) -> str:
        """What compression sends; empty without it."""
        return self.variant.partition(",")[0] if self.variant in (*SIXTEEN_BITS, *EACH_SUM) else ""

    @property
    def slots(self) -> PartialSums:
        return slots(BOUNDS[self.ranks])


def covering() -> Iterator[Case]:
    """Every version, dtype and rank count, with lengths and alignments that differ from one to the next."""
    lengths = itertools.cycle((33, 1, 0, 100, 7, 64, 259))
    shifts = itertools.cycle(((0,), (1,), (3,), (0, 1)))
    apart = itertools.cycle((False, True, False))
    scales = itertools.cycle((1.0, 1 / 3))
    for dtype, version, ranks in itertools.product(DTYPES, VERSIONS, BOUNDS):
        yield Case(version, dtype, ranks, next(lengths), next(shifts), "scale", next(apart), next(scales))
    for variant, ranks in itertools.product((*SIXTEEN_BITS, *EACH_SUM), BOUNDS):
        yield Case("two-shot", "float32", ranks, next(lengths), next(shifts), variant, next(apart), next(scales))
    for number, (dtype, version) in enumerate(itertools.product(DTYPES, ("ring", "halving-doubling"))):
        # long enough for several packs a thread, and some left over
        yield Case(version, dtype, 2 + number % 2, 1403, next(shifts), "scale", next(apart), next(scales))


def shared(data: Array) -> Array:
    """A copy in memory that processes forked later see too, and that begins at a page."""
    copy = np.frombuffer(mmap.mmap(-1, max(data.nbytes, 1)), data.dtype, data.size)
    copy[:] = data
    return copy


class View:
    """Numbers inside a buffer of device memory, as kernels are given them."""

    def __init__(self, buffer: Array, start: int, like: Array) -> None:
        self.buffer, self.dtype, self.shape = buffer, like.dtype, like.shape
        address = buffer.__cuda_array_interface__["data"][0] + start
        self.__cuda_array_interface__ = {
            "shape": like.shape,
            "typestr": like.dtype.str,
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Host:
    """Bytes of the host that claim to be in device memory: for what is prepared and never run."""

    def __init__(self, data: Array) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape
        self.__cuda_array_interface__ = data.__array_interface__


def host_view(buffer: Array, start: int, like: Array) -> Array:
    return buffer[start : start + like.nbytes].view(like.dtype)


@dataclass(frozen=True)
class Placed:
    """An array somewhere inside a buffer whose rest nobody may write; ``before``: the buffer's bytes at first."""

    array: Array
    buffer: Array
    before: Array
    start: int
    dtype: Any
    nbytes: int


class Memory:
    """The arrays of a case.

    ``place(bytes)`` puts a buffer of bytes where the kernels are to find it, at a multiple of 16; ``view`` makes an
    array of a part of it.
    """

    def __init__(self, case: Case, place: Callable[[Array], Array], view: Callable[..., Array] = host_view) -> None:
        self.case, self.place, self.view = case, place, view
        self.random = np.random.default_rng([case.ranks, DTYPES.index(case.dtype), case.length])
        owners = case.slots.owners
        self.inputs = [self._numbers() for _ in owners]
        self.slots = [self._placed(values, i) for i, values in enumerate(self.inputs)]
        coded = range(len(owners) if case.wire_dtype else 0)
        self.codes = [self._placed(np.zeros(case.length, np.uint16), i) for i in coded]

    def _numbers(self) -> Array:
        """Numbers of many sizes, of which sums depend on the order."""
        numbers = self.random.standard_normal(self.case.length) * 2.0 ** self.random.integers(-12, 12, self.case.length)
        if self.case.dtype == "bfloat16":
            return reference.round_to_bfloat16(numbers.astype(np.float32))
        return numbers.astype(self.case.dtype)

    def _placed(self, values: Array, number: int) -> Placed:
        start = GUARD + self.case.shifts[number % len(self.case.shifts)] * values.itemsize
        host = np.full(start + values.nbytes + GUARD, 0xA5, np.uint8)
        host[start : start + values.nbytes] = values.view(np.uint8)
        buffer = self.place(host)
        return Placed(self.view(buffer, start, values), buffer, host, start, values.dtype, values.nbytes)

    @property
    def arrays(self) -> list[Array]:
        return [placed.array for placed in self.slots]

    def options(self) -> dict[str, Any]:
        """What ``make`` is given besides arrays, slots, rank, mode and flags."""
        options: dict[str, Any] = {"scale": self.case.scale}
        if self.codes:
            codes = [placed.array for placed in self.codes]
            options["compression"] = Codes(dtype=self.case.wire_dtype, scale=self._wire_scale, arrays=codes)
            options["each_sum"] = self.case.variant in EACH_SUM
        return options

    @property
    def _wire_scale(self) -> float:
        return 2.0**-6 if self.case.wire_dtype == "float16" else 1.0

    def _result(self) -> Array:
        """The scaled sum, in the tree's order."""
        case, tree = self.case, self.case.slots
        if self.codes:
            to = case.wire_dtype, self._wire_scale
            sent = [rounded(values, *to) for values in self.inputs]
            if case.variant in EACH_SUM:
                return node_sum(tree.tree, sent, *to) * np.float32(case.scale)
            return rounded(reference.allreduce(sent, tree), *to) * np.float32(case.scale)
        if case.dtype == "bfloat16":
            decoded = [reference.from_bfloat16(codes) for codes in self.inputs]
            return reference.round_to_bfloat16(reference.allreduce(decoded, tree, case.scale))
        if case.dtype == "float16":
            decoded = [values.astype(np.float32) for values in self.inputs]
            return reference.allreduce(decoded, tree, case.scale).astype(np.float16)
        return reference.allreduce(self.inputs, tree, case.scale)

    def _expected(self) -> Iterator[tuple[str, Placed, Array]]:
        """What arrays shall hold afterwards."""
        tree, result = self.case.slots, self._result()
        for rank in range(len(set(tree.owners))):
            yield f"the result of rank {rank}", self.slots[tree.of(rank)[0]], result

    def wrong(self, fetch: Callable[[Array], Array] = np.asarray) -> str | None:
        """What differs from what is expected, to the bit, or was written and should not have been."""
        for name, placed, expected in self._expected():
            actual = fetch(placed.buffer)[placed.start : placed.start + placed.nbytes].view(placed.dtype)
            if actual.tobytes() != expected.tobytes():
                at = int(np.flatnonzero(actual != expected)[0])
                return f"{name} at {at} is {actual[at]}, not {expected[at]}"
        for placed in (*self.slots, *self.codes):
            outside = np.ones(len(placed.before), bool)
            outside[placed.start : placed.start + placed.nbytes] = False
            if (fetch(placed.buffer)[outside] != placed.before[outside]).any():
                return f"something was written outside of an array of {placed.dtype} [{self.case.length}]"
        return None


def prepared(case: Case, mode: str, **changed: Any) -> tuple[Any, Any]:
    """(Arguments, Work) of a case, over memory of the host, for kernels that are compiled and never run."""
    from dpsim.kernels.allreduce.cuda import arguments, prepare

    memory = Memory(case, Host, View)
    ranks = len(set(case.slots.owners))
    flags = [Host(np.zeros(flag_words(ranks), np.uint32)) for _ in range(ranks)]
    options = {"rank": 1 if mode == "flags" else None, "flags": flags} | memory.options() | changed
    given = arguments.Arguments(case.version, tuple(memory.arrays), case.slots, mode=mode, **options)
    return given, prepare.work_of(given)


def need_a_compiler() -> None:
    """Skip where CUDA's compiler is missing, which ``make test`` installs, or numba-cuda cannot use it."""
    import pytest
    from cuda import pathfinder

    if reason := why_no_kernels():
        pytest.skip(reason)

    for library in ("nvvm", "nvJitLink"):
        try:
            pathfinder.load_nvidia_dynamic_lib(library)
        except pathfinder.DynamicLibNotFoundError:
            pytest.skip(f"CUDA's {library} is not installed: pip install -e '.[ptx]'")


def stub_driver(folder: Path) -> dict[str, str]:
    """Variables with which a process loads a CUDA driver that runs no kernel; its launches are in ``folder/launches``.

    Skips where there is no C compiler, or not CUDA's.
    """
    import pytest

    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) for the stub of CUDA's driver")
    need_a_compiler()
    source, library = Path(__file__).parent / "stub_libcuda.c", folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    return {
        "LD_LIBRARY_PATH": str(folder),
        "STUB_LAUNCHES": str(folder / "launches"),
        "CUDA_VISIBLE_DEVICES": "0",
        "NUMBA_ENABLE_CUDASIM": "0",
    }


JOINED = re.compile(r"\bfma\.|\bmad\.\w+\.f|\bmul\.f|\bftz\b|approx|\.full\.")
"""Instructions that round otherwise than one operation at a time."""


def code_of(kernel: Any, given: tuple[Any, ...], cc: tuple[int, int] = (8, 0)) -> str:
    """The PTX of a kernel for arguments, by default for sm_80 (every GPU since then runs it)."""
    from numba import cuda

    from dpsim.kernels.allreduce.cuda import prepare

    ptx, _ = cuda.compile(
        kernel.py_func,
        prepare.signature(given),
        cc=cc,
        device=False,
        abi="numba",
        output="ptx",
        launch_bounds=kernel.targetoptions["launch_bounds"],
    )
    return str(ptx)


def assembled(ptx: str, architecture: str) -> tuple[bytes, str]:
    """(cubin, what ptxas says about it)."""
    from cuda.bindings import nvjitlink

    handle = nvjitlink.create(3, [f"-arch={architecture}", "-verbose", "-Xptxas=-v"])
    try:
        code = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, code, len(code), "kernel")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        said = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, said)
        return bytes(cubin), said.decode()
    finally:
        nvjitlink.destroy(handle)


def simulated(python: Callable[..., Any], script: str, *arguments: str, timeout_s: float = 60) -> Any:
    """What a script of this folder prints, as JSON, in numba's simulator; ``python`` is the fixture."""
    here = Path(__file__).parent
    env = {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": extended_path(here.parents[1], here)}
    ran = python(str(here / script), *arguments, env=env, timeout_s=timeout_s)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
