"""The CUDA kernels without a GPU: compiled for two generations and looked into, and run in numba's simulator."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cuda_cases as cases
import numpy as np
import pytest
from cuda_cases import assembled

from dpsim.errors import ConfigError
from dpsim.kernels.allreduce.cuda.launch import Codes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("numba_cuda") is None, reason="numba-cuda is not installed (pip install -e '.[dev]')"
)
RANKS = 4
MOST_REGISTERS = {"halving-doubling": 128, "one-shot": 64, "two-shot": 64}
"""A multiprocessor has 65536: one block of 512 threads runs, with four accesses a thread under way, or two blocks."""


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
    fused = (("float16", "one-launch"), ("bfloat16", "flags"), ("float16", "split"))
    fused += (("float16, each sum", "flags"), ("bfloat16, each sum", "split"))
    return [*some, *((replace(case, variant=variant), mode) for variant, mode in fused)]


CHOSEN = [
    pytest.param(
        case,
        mode,
        id=f"{case.version}-{case.dtype}-{case.variant}-{mode}",
        marks=[] if case.dtype == "float32" else [pytest.mark.slow],
    )
    for case, mode in chosen()
]


@pytest.fixture(scope="module")
def compiled() -> Callable[[cases.Case, str], str]:
    """The PTX of exactly what ``make`` would start, for sm_80 (every GPU since then runs it)."""
    cases.need_a_compiler()
    from dpsim.kernels.allreduce.cuda import prepare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "on_device", lambda words: cases.Host(np.array(words, np.int64)))

        @functools.cache
        def compile_one(case: cases.Case, mode: str, cc: tuple[int, int] = (8, 0)) -> str:
            given, work = cases.prepared(case, mode)
            return cases.code_of(work.kernel, prepare.call(given, work, 0, 1, 0), cc)

        yield compile_one


def vector_accesses(ptx: str, direction: str) -> list[str]:
    return re.findall(rf"\b{direction}\.global\.(v[248]\.[a-z]+\d+)", ptx)


@pytest.mark.parametrize(("case", "mode"), CHOSEN)
def test_kernels_compile_for_sm_80_and_sm_90_without_spilling(
    case: cases.Case, mode: str, compiled: Callable[..., str]
) -> None:
    ptx = compiled(case, mode)
    for architecture in ("sm_80", "sm_90"):
        cubin, said = assembled(ptx, architecture)
        assert cubin[:4] == b"\x7fELF"
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
        registers = int(re.findall(r"[Uu]sed (\d+) registers", said)[-1])
        assert registers <= MOST_REGISTERS[case.version]


def test_kernels_compile_for_sm_90_as_their_own_target(compiled: Callable[..., str]) -> None:
    ptx = compiled(cases.Case("one-shot", "float32", RANKS, 100), "flags", (9, 0))
    assert ".target sm_90" in ptx
    assert assembled(ptx, "sm_90")[0][:4] == b"\x7fELF"


@pytest.mark.parametrize(("case", "mode"), CHOSEN)
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


@pytest.mark.parametrize(("case", "mode"), CHOSEN)
def test_no_product_is_joined_with_a_sum(case: cases.Case, mode: str, compiled: Callable[..., str]) -> None:
    ptx = compiled(case, mode)
    assert not re.findall(r"\bfma\.|\bmad\.\w+\.f|\bmul\.f|\bftz\b|add\.ftz", ptx)
    assert "mul.rn.f" in ptx


@pytest.mark.parametrize(("case", "mode"), CHOSEN)
def test_arguments_are_packed_as_the_compiled_kernel_takes_them(
    case: cases.Case, mode: str, compiled: Callable[..., str]
) -> None:
    from dpsim.kernels.allreduce.cuda import bound, prepare

    entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", compiled(case, mode))
    assert entry is not None
    kinds = re.findall(r"\.param\s+\.([a-z])(\d+)", entry[1])
    given, work = cases.prepared(case, mode)
    packed = bound.Packed(prepare.call(given, work, 0, 1, 0))
    assert [int(bits) // 8 for _, bits in kinds] == [dtype.itemsize for dtype in packed.dtypes]
    for (kind, _), dtype in zip(kinds, packed.dtypes, strict=True):
        assert kind in ("f", "b") if dtype.kind == "f" else kind in ("u", "s", "b")


def innermost_loops(lines: list[str]) -> list[list[str]]:
    """The lines from a label to each jump back to it, where no other such loop lies between them."""
    labels = {line.rstrip(":"): i for i, line in enumerate(lines) if line.startswith("$") and line.endswith(":")}
    jumps = ((i, re.search(r"bra(?:\.uni)?\s+(\$\w+)", line)) for i, line in enumerate(lines))
    loops = {(labels[jump[1]], i) for i, jump in jumps if jump and labels[jump[1]] < i}
    inner = {(a, b) for a, b in loops if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)}
    return [lines[first : last + 1] for first, last in sorted(inner)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_moves_read_four_packs_of_a_partial_sum_for_each_time_they_look_up_where_it_lies(
    dtype: str, compiled: Callable[..., str]
) -> None:
    ptx = compiled(cases.Case("halving-doubling", dtype, RANKS, 100), "split")
    inner = ["\n".join(loop) for loop in innermost_loops([line.strip() for line in ptx.splitlines()])]
    counted = [(len(vector_accesses(loop, "ld")), len(re.findall(r"\bld\.global\.[bu]64", loop))) for loop in inner]
    assert any(packs >= 4 * addresses > 0 for packs, addresses in counted)


@pytest.mark.parametrize(("mode", "scope"), [("flags", "sys"), ("one-launch", "gpu")])
@pytest.mark.parametrize("version", ["halving-doubling", "one-shot"])
def test_ranks_wait_by_flags_that_are_read_anew_in_each_turn(
    version: str, mode: str, scope: str, compiled: Callable[..., str]
) -> None:
    ptx = compiled(cases.Case(version, "float32", RANKS, 100), mode)
    other = {"sys": "gpu", "gpu": "sys"}[scope]
    assert f"st.release.{scope}.global.u32" in ptx
    assert f".{other}." not in ptx
    loops = innermost_loops([line.strip() for line in ptx.splitlines()])
    polls = [loop for loop in loops if any(f"ld.acquire.{scope}.global.u32" in line for line in loop)]
    assert polls
    for loop in polls:
        assert len(loop) < 20
        assert not vector_accesses("\n".join(loop), "ld")
        assert not any("%globaltimer" in line for line in loop)  # the clock is read once in many polls
    assert "%globaltimer" in ptx
    # every wait: all threads of the block have written, some thread releases; some acquires, all threads go on
    order = re.findall(r"bar(?:rier)?(?:\.cta)?\.(?:sync|red)|st\.release|ld\.acquire", ptx)
    kinds = [kind for kind, _ in itertools.groupby("bar" if "bar" in word else word for word in order)]
    assert kinds[:3] == ["bar", "st.release", "ld.acquire"]
    assert order.count("st.release") > 0 and any("red" in word for word in order)


def test_kernels_that_do_not_wait_have_no_flags(compiled: Callable[..., str]) -> None:
    for version in ("halving-doubling", "one-shot", "two-shot"):
        ptx = compiled(cases.Case(version, "float32", RANKS, 100), "split")
        assert not re.findall(r"\.acquire|\.release|bar\.sync|bar\.red|globaltimer", ptx)


def test_only_kernels_that_wait_ask_for_a_cooperative_launch() -> None:
    from numba.core import types
    from numba.cuda.compiler import compile_cuda

    from dpsim.kernels.allreduce.cuda import flags

    release, read = flags.release("gpu"), flags.read_word

    def waits(address):  # type: ignore[no-untyped-def]
        release(address, read(address))

    def reads(address):  # type: ignore[no-untyped-def]
        read(address)

    cases.need_a_compiler()
    for function, cooperative in ((waits, True), (reads, False)):
        built = compile_cuda(function, types.void, (types.int64,), nvvm_options={}, cc=(8, 0))
        assert built.library.use_cooperative == cooperative


def test_split_kernels_in_the_simulator_give_the_reference_to_the_bit(python: Callable[..., Any]) -> None:
    said = cases.simulated(python, "simulate_cuda.py", "0", "1")
    assert said["wrong"] == []
    assert said["cases"] > 150


def test_ranks_that_are_processes_wait_for_each_other_by_flags_in_the_simulator(python: Callable[..., Any]) -> None:
    """Also while the numbers of the points begin anew at 2^32."""
    assert cases.simulated(python, "simulate_cuda_flags.py", "8") == {"1": [], "2": [], "3": [], "4": []}


def test_a_rank_that_does_not_come_ends_the_kernels_of_all_and_is_named(python: Callable[..., Any]) -> None:
    """Also its own, when it comes at last."""
    results = cases.simulated(python, "simulate_cuda_flags.py", "missing")
    assert [(result["version"], result["ranks"]) for result in results][-2:] == [("two-shot", 2), ("ring", 4)]
    for result in results:
        ranks, missing = result["ranks"], result["ranks"] - 1
        assert len(result["said"]) == ranks
        for text in result["said"]:
            named = re.match(r"rank (\d) has waited 0.5 s for rank (\d) in an allreduce on GPUs", text)
            assert named is not None and int(named[1]) < missing and int(named[2]) == missing
    assert all(min(result["taken_s"][:-1]) >= 0.5 for result in results if result["ranks"] == 2)


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
        ({"mode": "flags", "rank": 0, "most_blocks": 0}, "most_blocks is 0"),
        ({"mode": "split", "rank": 4}, "rank 4"),
        ({"version": "ring", "compression": Codes(dtype="float16", scale=1.0, arrays=[])}, "ring with compression"),
        ({"compression": Codes(dtype="float64", scale=1.0, arrays=[])}, "compression to float64"),
        ({"compression": Codes(dtype="float16", scale=3.0, arrays=[])}, "compression to float16 with scale 3.0"),
        ({"compression": Codes(dtype="bfloat16", scale=0.5, arrays=[])}, "compression to bfloat16 with scale 0.5"),
        ({"each_sum": True}, "two-shot on float32 with every sum of two rounded"),
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
