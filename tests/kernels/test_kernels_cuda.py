"""The CUDA kernels without a GPU: compiled for two generations and looked into, and run in numba's simulator."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cuda_cases as cases
import numpy as np
import pytest
from python_path import extended_path

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.cuda.launch import Codes, Momentum, flag_words

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install -e '.[dev]')"
)
HERE = Path(__file__).parents[1] / "support"
RANKS = 4


def chosen() -> list[tuple[cases.Case, str]]:
    """Cases and modes to compile.

    Every version in every mode in float32; the other dtypes, and what is fused, in some modes: the code that waits and
    the code that reads and adds do not depend on each other. Ring runs halving-doubling's kernel over its own table.
    """
    case = cases.Case("two-shot", "float32", RANKS, 100)
    modes = ("one-launch", "flags", "split")
    versions = ("halving-doubling", "one-shot", "two-shot")
    some = [(replace(case, version=version), mode) for version, mode in itertools.product(versions, modes)]
    for shift, dtype in enumerate(("float16", "bfloat16", "float64")):
        for number, version in enumerate(versions):
            some.append((replace(case, version=version, dtype=dtype), modes[(shift + number) % 3]))
    fused = (("float16", "one-launch"), ("bfloat16", "flags"), ("float16", "split"), ("sgd", "flags"))
    some += [(replace(case, variant=variant), mode) for variant, mode in fused]
    return [*some, (replace(case, dtype="float64", variant="sgd"), "split")]


CHOSEN = chosen()
IDS = [f"{case.version}-{case.dtype}-{case.variant}-{mode}" for case, mode in CHOSEN]


def host_view(buffer: Any, start: int, like: Any) -> Any:
    return cases.View(buffer, start, like)


def prepared(case: cases.Case, mode: str, **changed: Any) -> tuple[Any, Any]:
    """(Arguments, Work) of a case, over memory of the host."""
    from dpsim.kernels.allreduce.cuda import arguments, prepare

    memory = cases.Memory(case, cases.Host, host_view)
    flags = [cases.Host(np.zeros(flag_words(RANKS), np.uint32)) for _ in range(len(set(case.slots.owners)))]
    options = {"rank": 1 if mode == "flags" else None, "flags": flags, "compression": None, "sgd": None}
    options |= memory.options() | changed
    given = arguments.Arguments(case.version, tuple(memory.arrays), case.slots, mode=mode, **options)
    return given, prepare.prepare(given)


@pytest.fixture(scope="module")
def compiled() -> Callable[[cases.Case, str], str]:
    """The PTX of exactly what ``make`` would start, for sm_80 (every GPU since then runs it)."""
    _need_a_compiler()
    from numba import cuda

    from dpsim.kernels.allreduce.cuda import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "on_device", lambda words: cases.Host(np.array(words, np.int64)))

        @functools.cache
        def compile_one(case: cases.Case, mode: str, cc: tuple[int, int] = (8, 0)) -> str:
            given, work = prepared(case, mode)
            types = prepare.signature(prepare.call(given, work, 0, 1, 0))
            ptx, _ = cuda.compile(
                work.kernel.py_func,
                types,
                cc=cc,
                device=False,
                abi="numba",
                output="ptx",
                launch_bounds=work.kernel.targetoptions["launch_bounds"],
            )
            return str(ptx)

        yield compile_one


def _need_a_compiler() -> None:
    """Skip where CUDA's compiler is missing. ``make test`` installs it."""
    from cuda import pathfinder

    for library in ("nvvm", "nvJitLink"):
        try:
            pathfinder.load_nvidia_dynamic_lib(library)
        except pathfinder.DynamicLibNotFoundError:
            pytest.skip(f"CUDA's {library} is not installed: pip install 'dpsim[ptx]'")


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


def vector_accesses(ptx: str, direction: str) -> list[str]:
    return re.findall(rf"\b{direction}\.global\.(v[248]\.[a-z]+\d+)", ptx)


@pytest.mark.parametrize(("case", "mode"), CHOSEN, ids=IDS)
def test_kernels_compile_for_sm_80_and_sm_90_without_spilling(
    case: cases.Case, mode: str, compiled: Callable[..., str]
) -> None:
    ptx = compiled(case, mode)
    for architecture in ("sm_80", "sm_90"):
        cubin, said = assembled(ptx, architecture)
        assert cubin[:4] == b"\x7fELF"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        assert int(re.findall(r"[Uu]sed (\d+) registers", said)[-1]) <= 128  # a block of 512 threads runs


@pytest.mark.parametrize("version", ["halving-doubling", "one-shot", "two-shot"])
def test_kernels_compile_for_sm_90_as_their_own_target(version: str, compiled: Callable[..., str]) -> None:
    ptx = compiled(cases.Case(version, "float32", RANKS, 100), "flags", (9, 0))
    assert ".target sm_90" in ptx
    assert assembled(ptx, "sm_90")[0][:4] == b"\x7fELF"


@pytest.mark.parametrize(("case", "mode"), CHOSEN, ids=IDS)
def test_memory_is_read_and_written_by_128_bits(case: cases.Case, mode: str, compiled: Callable[..., str]) -> None:
    ptx = compiled(case, mode)
    for direction in ("ld", "st"):
        accesses = vector_accesses(ptx, direction)
        assert accesses
        for access in accesses:
            count, bits = re.fullmatch(r"v(\d)\.[a-z]+(\d+)", access).groups()  # type: ignore[union-attr]
            assert int(count) * int(bits) == 128
    assert ".local" not in ptx.replace("12_3clocals", "")
    assert "ld.global.nc" not in ptx  # other ranks write what is read


def test_two_shot_reads_each_slot_once_and_writes_each_result_once(compiled: Callable[..., str]) -> None:
    for dtype in ("float32", "bfloat16"):
        ptx = compiled(cases.Case("two-shot", dtype, RANKS, 100), "split")
        reads, writes = (len(vector_accesses(ptx, direction)) for direction in ("ld", "st"))
        assert reads == writes
        assert reads % RANKS == 0


@pytest.mark.parametrize(("case", "mode"), CHOSEN, ids=IDS)
def test_no_product_is_joined_with_a_sum(case: cases.Case, mode: str, compiled: Callable[..., str]) -> None:
    ptx = compiled(case, mode)
    assert not re.findall(r"\bfma\.|\bmad\.\w+\.f|\bmul\.f|\bftz\b|add\.ftz", ptx)
    assert "mul.rn.f" in ptx


def loops(lines: list[str]) -> list[list[str]]:
    """The lines from a label to each jump back to it."""
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    jumps = ((i, re.search(r"bra(?:\.uni)?\s+(\$\w+)", line)) for i, line in enumerate(lines))
    return [lines[labels[jump[1]] : i + 1] for i, jump in jumps if jump and labels[jump[1]] < i]


@pytest.mark.parametrize(("mode", "scope"), [("flags", "sys"), ("one-launch", "gpu")])
@pytest.mark.parametrize("version", ["halving-doubling", "one-shot"])
def test_ranks_wait_by_flags_that_are_read_anew_in_each_turn(
    version: str, mode: str, scope: str, compiled: Callable[..., str]
) -> None:
    ptx = compiled(cases.Case(version, "float32", RANKS, 100), mode)
    other = {"sys": "gpu", "gpu": "sys"}[scope]
    assert f"st.release.{scope}.global.u32" in ptx
    assert f".{other}." not in ptx
    lines = [line.strip() for line in ptx.splitlines()]
    inner = [loop for loop in loops(lines) if not any("bar.sync" in line for line in loop)]
    polls = [loop for loop in inner if any(f"ld.acquire.{scope}.global.u32" in line for line in loop)]
    assert polls
    for loop in polls:
        assert len(loop) < 20  # the innermost one
        assert not vector_accesses("\n".join(loop), "ld")
    # every wait: all threads of the block have written, some thread releases; some acquires, all threads go on
    order = re.findall(r"bar\.sync|barrier\.sync|st\.release|ld\.acquire", ptx)
    kinds = [kind for kind, _ in itertools.groupby("bar" if "bar" in word else word for word in order)]
    assert kinds[:4] == ["bar", "st.release", "ld.acquire", "bar"]


def test_kernels_that_do_not_wait_have_no_flags(compiled: Callable[..., str]) -> None:
    for version in ("halving-doubling", "one-shot", "two-shot"):
        ptx = compiled(cases.Case(version, "float32", RANKS, 100), "split")
        assert not re.findall(r"\.acquire|\.release|bar\.sync", ptx)


def test_only_kernels_that_wait_ask_for_a_cooperative_launch() -> None:
    from numba.core import types
    from numba.cuda.compiler import compile_cuda

    from dpsim.kernels.allreduce.cuda import flags

    release, read = flags.release("gpu"), flags.read_word

    def waits(address):  # type: ignore[no-untyped-def]
        release(address, read(address))

    def reads(address):  # type: ignore[no-untyped-def]
        read(address)

    _need_a_compiler()
    for function, cooperative in ((waits, True), (reads, False)):
        built = compile_cuda(function, types.void, (types.int64,), nvvm_options={}, cc=(8, 0))
        assert built.library.use_cooperative == cooperative


def simulated(python: Callable[..., Any], script: str, *arguments: str) -> Any:
    path = extended_path(HERE.parents[1], HERE)
    ran = python(str(HERE / script), *arguments, env={"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_split_kernels_in_the_simulator_give_the_reference_to_the_bit(python: Callable[..., Any]) -> None:
    said = simulated(python, "simulate_cuda.py", "0", "1")
    assert said["wrong"] == []
    assert said["cases"] > 150


def test_ranks_that_are_processes_wait_for_each_other_by_flags_in_the_simulator(python: Callable[..., Any]) -> None:
    """Also while the numbers of the points begin anew at 2^32."""
    assert simulated(python, "simulate_cuda_flags.py", "8") == {"1": [], "2": [], "3": [], "4": []}


def test_a_flag_is_behind_or_not_whatever_the_numbers_have_come_to() -> None:
    from dpsim.kernels.allreduce.cuda.kernels import behind

    for point in (0, 1, 5, 2**31 - 1, 2**31, 2**32 - 1):
        assert behind.py_func((point - 1) % 2**32, point)
        assert not behind.py_func(point, point)
        assert not behind.py_func((point + 1) % 2**32, point)


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"mode": "flags"}, "mode 'flags' for all ranks"),
        ({"mode": "one-launch", "rank": 0}, "mode 'one-launch' for one rank"),
        ({"mode": "flags", "rank": 0, "flags": None}, "mode 'flags' without flags"),
        ({"mode": "split", "rank": 4}, "rank 4"),
        ({"version": "ring", "sgd": Momentum(w=[], v=[], momentum=0.0, rate=0.0)}, "ring with sgd"),
        ({"sgd": Momentum(w=[], v=[], momentum=0.0, rate=0.0)}, "0 arrays as w"),
        ({"compression": Codes(dtype="float64", scale=1.0, arrays=[])}, "compression to float64"),
        ({"compression": Codes(dtype="float16", scale=3.0, arrays=[])}, "compression to float16 with scale 3.0"),
        ({"compression": Codes(dtype="bfloat16", scale=0.5, arrays=[])}, "compression to bfloat16 with scale 0.5"),
        ({"arrays": 3}, "3 arrays as arrays"),
        ({"dtype": "int32"}, "arrays of int32"),
    ],
)
def test_what_a_version_cannot_do_is_refused(changed: dict[str, Any], given: str) -> None:
    from dpsim.kernels.allreduce.cuda import prepare

    order = cases.slots(range(RANKS + 1))
    options = {"mode": "split", "version": "two-shot", "dtype": "float32", "arrays": RANKS} | changed
    count, name, dtype = (options.pop(key) for key in ("arrays", "version", "dtype"))
    arrays = [cases.Host(np.zeros(8, dtype)) for _ in range(count)]
    with pytest.raises(ConfigError, match=re.escape(given)):
        prepare.make(name, arrays, order, **options)


def test_arrays_of_different_length_or_not_contiguous_are_refused() -> None:
    from dpsim.kernels.allreduce.cuda import prepare

    order = cases.slots([0, 1, 2])
    with pytest.raises(ConfigError, match=r"float32 \[9\] among arrays"):
        prepare.make("two-shot", [cases.Host(np.zeros(n, np.float32)) for n in (8, 9)], order)
    with pytest.raises(ConfigError, match="strides"):
        prepare.make("two-shot", [cases.Host(np.zeros(16, np.float32)[::2]) for _ in range(2)], order)
    with pytest.raises(ConfigError, match="an array of type ndarray"):
        prepare.make("two-shot", [np.zeros(8, np.float32) for _ in range(2)], order)


class Recorded:
    """A kernel that runs nothing and notes what it is started with, on a GPU that runs ``at_once`` blocks at once."""

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self.configured: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def compile(self, types: Any) -> Any:
        return self

    def max_cooperative_grid_blocks(self, threads: int) -> int:
        return self.at_once

    def __getitem__(self, configuration: tuple[Any, ...]) -> Callable[..., None]:
        self.configured.append(configuration)
        return lambda *args: self.started.append((configuration[0], *args))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Recorded]]:
    """(Launch, its kernel) of a case."""
    from dpsim.kernels.allreduce.cuda import prepare

    monkeypatch.setattr(prepare, "on_device", lambda words: cases.Host(np.array(words, np.int64)))

    def make(
        version: str, mode: str, *, at_once: int = 264, length: int = 1 << 20, **changed: Any
    ) -> tuple[Any, Recorded]:
        given, work = prepared(cases.Case(version, "float32", RANKS, length), mode, **changed)
        kernel = Recorded(at_once)
        return prepare.launch(given, replace(work, kernel=kernel)), kernel

    return make


def test_a_stage_starts_one_kernel_and_is_configured_once_a_stream(recorded: Callable[..., Any]) -> None:
    launch, kernel = recorded("two-shot", "one-launch")
    one, other = object(), object()
    for stream in (one, one, one, other, other):
        for stage in launch.stages:
            stage(stream)
    assert [configuration[2] for configuration in kernel.configured] == [one, other]
    assert len(kernel.started) == 5
    assert len(set(map(str, kernel.started))) == 1


def test_stages_do_the_steps_one_after_another(recorded: Callable[..., Any]) -> None:
    def steps(version: str, mode: str, **changed: Any) -> tuple[int, list[tuple[int, int]], set[int]]:
        launch, kernel = recorded(version, mode, **changed)
        for stage in launch.stages:
            stage(0)
        return len(launch.stages), [call[1:3] for call in kernel.started], {call[3] for call in kernel.started}

    each = [(step, step + 1) for step in range(6)]
    assert steps("ring", "one-launch") == (1, [(0, 6)], {0})
    assert steps("ring", "flags") == (1, [(0, 6)], {1})
    assert steps("ring", "split") == (6, each, {0})
    assert steps("ring", "split", rank=2) == (8, each, {2})  # and where it is ready, and done
    assert steps("one-shot", "split") == (2, each[:2], {0})
    assert steps("two-shot", "split", rank=3) == (3, each[:1], {3})
    assert steps("two-shot", "one-launch") == (1, each[:1], {0})


def test_ranks_have_as_many_blocks_as_run_at_once_and_elements_need(recorded: Callable[..., Any]) -> None:
    def grid(version: str, mode: str, **changed: Any) -> Any:
        launch, kernel = recorded(version, mode, **changed)
        launch.stages[0](0)
        return kernel.started[0][0]

    assert grid("one-shot", "one-launch") == (66, RANKS)
    assert grid("one-shot", "one-launch", length=5000) == (3, RANKS)
    assert grid("two-shot", "one-launch", length=16_384) == (2, RANKS)
    assert grid("one-shot", "flags") == (64, 1)
    with pytest.raises(ConfigError, match="flags between GPUs of which this one runs 32 blocks at once"):
        recorded("one-shot", "flags", at_once=32)
    with pytest.raises(ConfigError, match="4 logical devices"):
        recorded("one-shot", "one-launch", at_once=3)
