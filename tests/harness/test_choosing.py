"""Which code computes: measured in plain training, once and alike on all ranks; never measured in leaves."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from msgspec import structs

from dpsim import codec, processor
from dpsim.choices import Choice, Choices, Operation, Problem
from dpsim.data import load_dataset
from dpsim.errors import ConfigError, FileFormatError
from dpsim.machine import Network, Selection
from dpsim.nn import build_model
from dpsim.nn.implementations import (
    CANDIDATES,
    TABLE_SCHEMA,
    KernelTable,
    Rule,
    Timing,
    candidates,
    committed,
    proposal,
)
from dpsim.plan import Plan
from dpsim.runtime import choice_file
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.trainer import Trainer

OnRanks = Callable[..., Any]
DATA = "synthetic:6x6x2,classes=3,train=40,test=10"
COMMITTED_VERSION, COMMITTED_DIGEST = 1, "94ff18584cb9f522"


def dense(rows: int = 7, inputs: int = 20, outputs: int = 30, operation: Operation = "product") -> Problem:
    return Problem(operation=operation, dtype="float32", rows=rows, sizes=(inputs, outputs))


def choice(candidate: str, problem: Problem, **ratios: float) -> Choice:
    return Choice(problem=problem.shape_class, candidate=candidate, time_ratios=ratios)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPSIM_CACHE_DIR", str(tmp_path))
    return tmp_path


@given(st.integers(1, 10**6))
def test_a_shape_class_stands_for_nearly_as_many_rows(rows: int) -> None:
    actual = dense(rows).shape_class
    assert actual.shape_class == actual
    assert max(actual.rows, rows) / min(actual.rows, rows) < 1.26 or (rows > 256 and actual.rows == 256)


def test_what_was_chosen_once_stays() -> None:
    first, second = choice("blas", dense()), choice("rows", dense())
    both = Choices(kernels=(first,)).with_more((second, choice("rows", dense(64))), (Selection(devices=2),))
    again = both.with_more((), (Selection(devices=2, algorithms=("two-shot",), below_bytes=()),))
    assert again.choice(dense()) == first and again.choice(dense(63)) is not None
    assert again.selections == (Selection(devices=2),)


def test_the_file_keeps_the_first_of_two_that_measured_at_the_same_time(own_folder: Path) -> None:
    nothing = choice_file.load()
    assert nothing.kernels == ()
    mine = choice_file.add(nothing, (choice("blas", dense()),))
    theirs = choice_file.add(nothing, (choice("rows", dense()), choice("rows", dense(64))))
    assert mine.choice(dense()) == theirs.choice(dense())
    assert choice_file.load() == theirs
    kept = choice_file.path()
    assert kept is not None
    kept.write_text("{")
    assert choice_file.load().kernels == ()
    choice_file.forget()
    assert not kept.exists()


@pytest.mark.parametrize("home", [True, False])
def test_without_a_writable_folder_choices_stay_in_memory(
    home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DPSIM_CACHE_DIR", str(tmp_path / "file" / "below"))
    if not home:
        monkeypatch.setattr("dpsim.kernels.cache.folder", lambda: None)
    known = choice_file.add(choice_file.load(), (choice("rows", dense()),))
    assert choice_file.load() == known and known.choice(dense()) is not None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_all_ranks_choose_alike_and_measure_once(devices: int, own_folder: Path, on_ranks: OnRanks) -> None:
    first = on_ranks("ranks_choosing:chosen", devices=devices)
    again = on_ranks("ranks_choosing:chosen", devices=devices)
    assert all(rank["names"] == first[0]["names"] for rank in first + again)
    assert [rank["timed"] for rank in first] == [3] * devices
    assert [rank["timed"] for rank in again] == [0] * devices
    assert first[0]["selections"] == again[0]["selections"] == ([devices] if devices > 1 else [])
    for name, ratios in zip(first[0]["names"], first[0]["ratios"], strict=True):
        assert "blas" in ratios and ratios[name] == min(ratios.values()) == 1


def test_the_slowest_candidate_is_told_and_soon_left_out() -> None:
    def slow(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        time.sleep(2e-3)

    timing = Timing(dense(), {"slow": slow})
    timing.run(0.0, least=5)
    assert timing.ratios()["slow"] > 3 and min(timing.ratios().values()) == 1
    assert len(timing.times["slow"]) == 2 and len(timing.times["blas"]) == 5


def test_kernels_compete_wherever_blas_may_be_slower() -> None:
    assert set(candidates(dense(64, 10, 10))) == {"blas"}
    assert set(candidates(dense(64, 256, 256))) == {"blas", "rows", "streamed", "packed"}
    assert set(candidates(dense(1, 2048, 10, "transposed_product"))) == {"blas", "packed", "outer"}
    assert set(candidates(dense(4, 256, 256))) == {"blas", "rows", "streamed"}
    assert set(candidates(dense(64, 10, 10, "transposed_product"))) == {"blas"}


def trainer(leaves: int) -> Trainer:
    dataset = load_dataset(DATA)
    replica = build_model("cnn:3,norm=none", dataset.input_shape, dataset.classes)
    plan = Plan(devices=1, global_batch=16, leaves=leaves, batch_norm="leaf" if leaves else "local")
    return Trainer(replica, dataset, plan, MPI.COMM_SELF, Network())


def test_training_in_leaves_measures_nothing(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(problem: Problem) -> None:
        raise AssertionError(f"{problem.name} is timed")

    monkeypatch.setattr("dpsim.nn.network.Timing", measured)
    reproducible = trainer(leaves=4)
    reproducible.step()
    reproducible.evaluate()
    assert reproducible.kernel_table == committed().digest
    with pytest.raises(AssertionError, match="conv2d 8 x 6x6 2->3 is timed"):
        trainer(leaves=0)


def test_a_run_that_goes_on_with_another_table_says_so(own_folder: Path) -> None:
    begun = trainer(leaves=4)
    begun.step()
    begun.log.gather()
    checkpoint = snapshot(begun, [1.0], {})
    assert checkpoint is not None and checkpoint.header.kernel_table == committed().digest
    messages: list[str] = []
    restore(trainer(leaves=4), checkpoint, messages.append)
    assert messages == []
    older = msgspec.structs.replace(checkpoint.header, kernel_table="0123456789abcdef")
    restore(trainer(leaves=4), dataclasses.replace(checkpoint, header=older), messages.append)
    (line,) = messages
    assert "0123456789abcdef" in line and committed().digest in line and "from step 1 on" in line


def test_a_plain_run_that_goes_on_with_other_choices_says_so(own_folder: Path) -> None:
    begun = trainer(leaves=0)
    begun.step()
    begun.log.gather()
    checkpoint = snapshot(begun, [1.0], {})
    assert checkpoint is not None
    messages: list[str] = []
    restore(trainer(leaves=0), checkpoint, messages.append)
    assert messages == []
    known = choice_file.load()
    others = [
        structs.replace(each, candidate=next(name for name in each.time_ratios if name != each.candidate))
        for each in known.kernels
        if len(each.time_ratios) > 1
    ]
    assert others
    choice_file.forget()
    choice_file.add(Choices(measured_on=known.measured_on), tuple(others))
    resumed = trainer(leaves=0)
    restore(resumed, checkpoint, messages.append)
    (line,) = messages
    assert checkpoint.header.kernel_table in line and resumed.kernel_table in line and "from step 1 on" in line
    other_shares = structs.replace(checkpoint.header, plan=structs.replace(checkpoint.header.plan, accumulate=2))
    restore(resumed, dataclasses.replace(checkpoint, header=other_shares), messages.append)
    assert messages == [line]


def test_a_run_measures_its_batches_and_its_evaluation_before_the_first_step(own_folder: Path) -> None:
    plain = trainer(leaves=0)
    assert plain.kernel_table not in ("", committed().digest)
    actual = {one.problem for one in choice_file.load().kernels}
    convolution, last = (6, 6, 2, 3, 3, 1), (3, 3)
    for rows in (16, 8):  # 40 samples in batches of 16: the last has 8
        for operation in ("conv2d", "conv2d_weight_gradient"):
            assert Problem(operation=operation, dtype="float32", rows=rows, sizes=convolution) in actual
        for operation in ("product", "product_with_transposed", "transposed_product"):
            assert Problem(operation=operation, dtype="float32", rows=rows, sizes=last) in actual
    evaluation = Problem(operation="product", dtype="float32", rows=10, sizes=last)
    assert evaluation.shape_class in actual
    assert "conv2d_input_gradient" not in {problem.operation for problem in actual}, "nobody uses a picture's gradient"


def test_the_committed_table_changes_with_its_version_alone() -> None:
    """Whoever changes a rule changes bits: count the version up, and write both down here."""
    assert (committed().version, committed().digest) == (COMMITTED_VERSION, COMMITTED_DIGEST)


@given(st.integers(0, 600), st.integers(1, 3000), st.integers(1, 3000))
def test_the_first_version_decides_as_constants_did_before_it(rows: int, inputs: int, outputs: int) -> None:
    table, large = committed(), inputs * outputs >= 1 << 17
    product = table.candidate(dense(rows, inputs, outputs))
    assert (product == "blas") == (large and rows > 256)
    transposed = table.candidate(dense(rows, inputs, outputs, "product_with_transposed"))
    by_kernel = "dot" if outputs >= 64 else "copied" if not large else "blas"
    assert transposed == ("blas" if large and rows > 256 else by_kernel)
    gradient = table.candidate(dense(rows, inputs, outputs, "transposed_product"))
    assert gradient == ("packed" if rows <= 512 else "blas")
    half = Problem(operation="product", dtype="float16", rows=rows, sizes=(inputs, outputs))
    assert table.candidate(half) == "blas"


def test_rules_are_for_a_processor_a_blas_a_dtype_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "family", lambda: "GenuineIntel avx512")
    monkeypatch.setattr(processor, "blas_architecture", lambda: "SkylakeX")
    rule = Rule(
        operation="product",
        candidate="blas",
        processor="GenuineIntel avx512",
        blas="SkylakeX",
        dtype="float32",
        least_rows=5,
        most_rows=9,
        least_inputs=20,
        most_outputs=30,
    )
    for changed, expected in (
        ({}, "blas"),
        ({"processor": "AuthenticAMD avx512"}, "rows"),
        ({"blas": "Zen"}, "rows"),
        ({"dtype": "float64"}, "rows"),
        ({"least_rows": 8}, "rows"),
        ({"most_rows": 6}, "rows"),
        ({"least_inputs": 21}, "rows"),
        ({"most_outputs": 29}, "rows"),
        ({"least_weights": 601}, "rows"),
    ):
        first = Rule(**{name: getattr(rule, name) for name in Rule.__struct_fields__} | changed)
        table = KernelTable(version=2, rules=(first, *committed().rules))
        assert table.candidate(dense()) == expected, changed
        assert table.digest != committed().digest


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown candidate for product 'dot'"):
        Rule(operation="product", candidate="dot")
    with pytest.raises(ConfigError, match="without a last rule for conv2d_weight_gradient"):
        KernelTable(version=1, rules=committed().rules[:-1])
    codec.write(tmp_path / "table.json", committed())
    text = (tmp_path / "table.json").read_text().replace('"most_rows"', '"most_rowz"')
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(FileFormatError, match="most_rows"):
        codec.read(tmp_path / "table.json", KernelTable, "kernel table", TABLE_SCHEMA)


def test_a_proposal_is_the_next_version_and_only_where_much_is_gained() -> None:
    slow, near = dense(64, 100, 10), dense(64, 200, 10)
    measured = Choices(kernels=(choice("blas", slow, blas=1, rows=1.5), choice("blas", near, blas=1, rows=1.05)))
    proposed = proposal(committed(), measured)
    assert proposed is not None and proposed.version == committed().version + 1
    assert proposed.candidate(slow) == "blas" and proposed.candidate(near) == "rows"
    assert proposed.candidate(dense(65, 100, 10)) == "rows"
    assert proposal(committed(), Choices(kernels=measured.kernels[1:])) is None


@pytest.mark.parametrize(
    ("devices", "name", "named"), [(2, "model", f"another, {processor.blas()}"), (3, "rounding", "rounding another")]
)
def test_ranks_that_compute_differently_are_refused(devices: int, name: str, named: str, on_ranks: OnRanks) -> None:
    answers = on_ranks("ranks_choosing:agreed", {"name": name}, devices=devices)
    assert len(set(answers)) == 1
    assert named in answers[0] and f"on rank {devices - 1}" in answers[0]


def test_a_table_has_candidates_that_exist_for_every_problem() -> None:
    network = build_model("cnn:4,5", (8, 8, 1), 10)
    for rows in (1, 8, 64, 300):
        for problem in network.problems(rows, training=True):
            assert committed().candidate(problem) in CANDIDATES[problem.operation]
