"""What is known in a case and what is judged; scores, by hand; defaults from the other sets."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_files import EXPERIMENTS

from dpsim.errors import ConfigError, FileFormatError
from dpsim.model.defaults import DEFAULTS
from dpsim.model.message import message
from dpsim.validation import contestants
from dpsim.validation.case import Case, Part, parts, read_cases
from dpsim.validation.defaults import NOBODY, TRIED, as_shipped, filling, of_other_clusters, widened_by_others
from dpsim.validation.inputs import RowInputs, fitted_step_inputs, outcome_s, row_plan
from dpsim.validation.judge import JudgedRow, judged
from dpsim.validation.published import PublishedRow, PublishedSet, read_sets
from dpsim.validation.run import validate, with_constants
from dpsim.validation.scores import pooled, score_sets
from dpsim.validation.widths import conformal_widths, widths_by_cell

EXAMPLE = EXPERIMENTS / "validation_example"
SETS = read_sets()
CASES = {case.name: case for case in read_cases(SETS)}


def of_case(name: str) -> list[Part]:
    return list(parts(CASES[name], SETS[CASES[name].dataset]))


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_no_row_is_both_known_and_judged(case: Case) -> None:
    found = list(parts(case, SETS[case.dataset]))
    for part in found:
        assert part.judged and part.known
        assert not {row.line for row in part.known} & {row.line for row in part.judged}
        for column in case.apart:
            assert len({row.values.get(column) for row in (*part.known, *part.judged)}) == 1
    lines = [row.line for part in found for row in part.judged]
    assert len(lines) == len(set(lines)), "a row is judged once in a case"


def test_a_prediction_does_not_change_with_the_outcomes_that_it_is_judged_on() -> None:
    """Each judged outcome is replaced by another one: no prediction, null or interval may notice."""
    for name in ("nccl-a100-powers", "bcaffe-steps", "mlperf-resnet50"):
        case = CASES[name]
        known = {row.line for part in of_case(name) for row in part.known}
        rows = tuple(
            row if row.line in known else PublishedRow(line=row.line, values=row.values, outcome=1e3)
            for row in SETS[case.dataset].rows
        )
        other = PublishedSet(provenance=SETS[case.dataset].provenance, rows=rows, path=SETS[case.dataset].path)
        before, after = judged([case], SETS), judged([case], {**SETS, case.dataset: other})
        for first, second in zip(before, after, strict=True):
            assert (first.predicted, first.low, first.high, first.others) == (
                second.predicted,
                second.low,
                second.high,
                second.others,
            )


def test_a_rows_columns_are_its_plan_and_its_outcome() -> None:
    (wfbp,) = (r for r in SETS["bcaffe_steps"].rows if r.values["method"] == "WFBP" and r.values["devices"] == 4)
    plan = row_plan(CASES["bcaffe-steps"], wfbp)
    assert (plan.devices, plan.layout, plan.global_batch, plan.fusion_rule) == (4, "4x1", 256, "per-tensor")
    assert (plan.overlap, plan.algorithm) == ("thread", "mpi")
    assert outcome_s(wfbp, SETS["bcaffe_steps"], plan) == pytest.approx(256 / 599.28)
    step = SETS["cs336_steps"].rows[0]
    assert outcome_s(step, SETS["cs336_steps"], row_plan(CASES["cs336-steps"], step)) == 0.8009


def test_a_free_number_fits_the_known_rows_and_no_others() -> None:
    part = next(part for part in of_case("pytorch-v100") if "resnet101/26214400/devices 8" in part.name)
    inputs = fitted_step_inputs(part, SETS)
    assert [row.values["devices"] for row in part.known] == [1]
    assert inputs[part.known[0].line].step_s() == pytest.approx(0.171, rel=1e-3)
    assert inputs[part.judged[0].line].step_s() != pytest.approx(0.179, rel=1e-3)


def test_a_row_that_is_no_plan_is_refused_with_its_line() -> None:
    row = PublishedRow(line=7, values={"devices": 4, "layout": "2x4", "size_bytes": 8}, outcome=1.0)
    with pytest.raises(FileFormatError, match=r"plan of case nccl-a100, line 7 of nccl_a100.csv: layout 2x4 is 8 dev"):
        row_plan(CASES["nccl-a100"], row)


def test_fewer_known_rows_than_free_numbers_are_refused() -> None:
    part = of_case("pytorch-buckets")[0]
    one = Part(case=part.case, dataset=part.dataset, name=part.name, known=part.known[:1], judged=part.judged)
    with pytest.raises(ConfigError, match="2 free numbers"):
        fitted_step_inputs(one, SETS)


def made(dataset: str, case: str, values: list[tuple[float, float, float, float, float]]) -> list[JudgedRow]:
    """Rows of (measured, predicted, low, high, what the only null says)."""
    inputs = RowInputs(workload=message(4), machine=None, plan=row_plan(CASES["nccl-a100"], SETS["nccl_a100"].rows[0]))  # type: ignore[arg-type]
    part = Part(case=CASES["nccl-a100"], dataset=dataset, name=case, known=(), judged=())
    return [
        JudgedRow(
            part=part,
            published=PublishedRow(line=2 + number, values={}, outcome=measured),
            inputs=inputs,
            others={"null": null, contestants.CALCULON: measured},
            cluster=dataset,
            cell="collective on other devices",
            unknown="network",
            measured=measured,
            predicted=predicted,
            low=low,
            high=high,
        )
        for number, (measured, predicted, low, high, null) in enumerate(values)
    ]


def test_scores_by_hand() -> None:
    rows = made("one", "one/a", [(1.0, 0.9, 0.8, 1.1, 1.4), (2.0, 2.4, 2.2, 2.6, 2.2)])
    rows += made("one", "one/b", [(4.0, 4.4, 3.6, 5.2, 2.0)])
    (score,) = score_sets(rows)
    assert (score.cases, score.rows, score.null, score.better_cases) == (2, 3, "null", 2)
    assert score.median_abs_error == pytest.approx(0.1) and score.max_abs_error == pytest.approx(0.2)
    assert score.null_median_abs_error == pytest.approx(0.4) and score.skill == pytest.approx(0.75)
    assert (score.best_null, score.best_null_skill) == ("null", score.skill)
    assert score.coverage == pytest.approx(2 / 3) and score.too_fast == pytest.approx(1 / 3)
    assert score.interval_score == pytest.approx((0.3 + (0.4 + 20 * 0.2) / 2 + 1.6 / 4) / 3)


def test_a_case_whose_nulls_do_not_exist_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "own"))
    path = folder / "cases" / "example.toml"
    path.write_text(path.read_text() + 'nulls = ["nearest tabel"]\n')
    with pytest.raises(ConfigError, match="nearest tabel") as refused:
        _ = validate(folder).scores
    assert "nearest table, between tables, alpha-beta" in refused.value.allowed


def test_a_constant_of_other_sets_knows_no_row_of_its_own_set() -> None:
    values = [(1.2, 1.0, 0.9, 1.1, 1.0)] * 3, [(1.5, 1.0, 0.9, 1.1, 1.0)]
    rows = [*made("many", "many/a", values[0]), *made("few", "few/a", values[1])]
    rows = [row.replaced(others={contestants.PERFECT: 1.0}) for row in rows]
    said = {row.dataset: row.others["perfect scaling by other sets"] for row in with_constants(rows)}
    assert said == {"many": pytest.approx(1.5), "few": pytest.approx(1.2)}


def test_pooled_every_cluster_weighs_the_same() -> None:
    many = made("many", "many/a", [(1.0, 1.1, 0.5, 2.0, 3.0)] * 9)
    few = made("few", "few/a", [(1.0, 1.5, 1.4, 1.6, 1.2)])
    (every,) = pooled(score_sets([*many, *few]))
    assert every.coverage == pytest.approx(0.5) and every.median_abs_error == pytest.approx(0.3)
    assert every.null_median_abs_error == pytest.approx((2.0 + 0.2) / 2)
    assert every.over_clusters("inside") == (0.0, 1.0) and every.clusters == 2


def test_two_sets_of_one_cluster_weigh_as_much_as_one_of_another() -> None:
    rows = [*made("one", "one/a", [(1.0, 1.1, 0.5, 2.0, 3.0)] * 2), *made("two", "two/a", [(1.0, 1.5, 1.4, 1.6, 1.2)])]
    rows += made("three", "three/a", [(1.0, 1.5, 1.4, 1.6, 1.2)])
    together = [row.replaced(cluster="both") if row.dataset in ("two", "three") else row for row in rows]
    (apart,), (joined,) = (pooled(score_sets(each)) for each in (rows, together))
    assert apart.coverage == pytest.approx(1 / 3) and joined.coverage == pytest.approx(1 / 2)


def test_the_width_of_the_constant_is_that_of_the_other_sets() -> None:
    """Two sets of one error each: each is scored with the width that the other one needs."""
    wide = made("wide", "wide/a", [(1.0, math.exp(0.4), 0.1, 9.0, 2.0)] * 4)
    narrow = made("narrow", "narrow/a", [(1.0, math.exp(0.1), 0.1, 9.0, 2.0)] * 4)
    scores = {score.name: score for score in score_sets([*wide, *narrow])}
    assert scores["narrow"].constant_interval_score == pytest.approx(math.exp(0.5) - math.exp(-0.3), rel=0.02)
    outside = math.exp(0.3) - 1
    assert scores["wide"].constant_interval_score == pytest.approx(
        math.exp(0.5) - math.exp(0.3) + 20 * outside, rel=0.05
    )


def test_published_formulas_as_their_sources_compute_them() -> None:
    assert contestants.calculon(1e9, 8, 2e-6, 1e11) == pytest.approx(2e-6 + 2e9 * 7 / 8 / 1e11)
    # 8 GPUs of one node, LL of Ampere: min(87.7, 2 * 300 / 4) GB/s, 14 hops of 0.6 us
    assert contestants.inductor(1e9, 1, 8) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 1e9 * 14 / 8 / 87.7e9)
    # 2 nodes: 2 * 25 / 4 GB/s, 30 hops, 4 of them over the network
    assert contestants.inductor(1e9, 2, 16) == pytest.approx(6.6e-6 + 26e-6 + 4 * 2.7e-6 + 1e9 * 30 / 16 / 12.5e9)


def test_nulls_of_a_collective_by_hand() -> None:
    known = [
        PublishedRow(line=2 + number, values={"devices": n, "size_bytes": size}, outcome=seconds)
        for number, (n, size, seconds) in enumerate([(2, 100, 1.0), (2, 200, 2.0), (8, 100, 4.0), (8, 200, 8.0)])
    ]
    row = PublishedRow(line=9, values={"devices": 4, "size_bytes": 100}, outcome=1.0)
    plan = row_plan(CASES["nccl-a100"], row)
    said = contestants.of_collective(known, row, plan)
    assert said["nearest table"] == 1.0 and said["between tables"] == pytest.approx(2.0)


def test_a_default_of_a_cluster_does_not_depend_on_that_cluster() -> None:
    cases = [CASES[name] for name in ("bcaffe-steps", "pytorch-v100", "records")]
    every = of_other_clusters(cases, SETS)
    rows = tuple(
        PublishedRow(
            line=row.line, values=row.values, outcome=row.outcome * 1.1 if row.values["devices"] > 1 else row.outcome
        )
        for row in SETS["bcaffe_steps"].rows
    )
    slow = PublishedSet(provenance=SETS["bcaffe_steps"].provenance, rows=rows, path=SETS["bcaffe_steps"].path)
    changed = of_other_clusters(cases, {**SETS, "bcaffe_steps": slow})
    assert changed["bcaffe"] == every["bcaffe"] and changed["pytorch-v100"] != every["pytorch-v100"]
    assert set(every) == {"bcaffe", "pytorch-v100", "records", NOBODY}


def test_a_default_is_what_predicts_the_other_cluster_best_and_fills_what_is_not_stated() -> None:
    case, other, published = CASES["pytorch-v100"], CASES["bcaffe-steps"], SETS["bcaffe_steps"]
    default = next(each for each in DEFAULTS if each.field == "compute_slowdown")
    errors = {}
    for value in TRIED[default.field]:
        rows = judged([other], SETS, fills={published.name: filling([replace(default, value=value)])})
        errors[value] = np.mean([abs(math.log(row.predicted / row.measured)) for row in rows])
    best = min(errors, key=lambda value: errors[value])
    inputs = fitted_step_inputs(next(parts(case, SETS["pytorch_v100"])), SETS)
    several = next(each for each in inputs.values() if each.plan.devices > 1)
    fill = filling(of_other_clusters([case, other], SETS, [default])["pytorch-v100"])
    assert fill(several).machine.compute_slowdown[0].factor == best > 1
    assert not several.machine.compute_slowdown and fill(fill(several)) == fill(several)


def test_a_default_is_assumed_where_nobody_states_it_and_named() -> None:
    inputs = fitted_step_inputs(next(parts(CASES["bcaffe-steps"], SETS["bcaffe_steps"])), SETS)
    open_input = next(each for each in inputs.values() if each.plan.devices > 1)
    contention = next(default for default in DEFAULTS if default.field == "contention")
    fill = filling([replace(contention, value=2.5)])
    assert fill(open_input).machine.contention == 2.5 and fill(open_input).machine.assumed == ("contention",)
    assert as_shipped(fill(open_input)).machine.assumed[0] == "contention"
    assert as_shipped(fill(open_input)).machine.contention == 2.5
    stated = replace(open_input, machine=msgspec.structs.replace(open_input.machine, contention=1.5))
    assert fill(stated) == stated


def clusters(misses: list[float]) -> list[JudgedRow]:
    """One row a cluster whose error is so many times the half width of its interval, in logarithms."""
    return [
        row
        for number, miss in enumerate(misses)
        for row in made(f"cluster {number}", f"cluster {number}/a", [(1.1**miss, 1.0, 1 / 1.1, 1.1, 2.0)])
    ]


@given(st.lists(st.floats(0.2, 5), min_size=2, max_size=12), st.floats(1.1, 3))
def test_widths_scale_with_what_clusters_miss(misses: list[float], factor: float) -> None:
    """Above the least scale that counts."""
    (once,), (twice,) = (widths_by_cell(clusters(each)).values() for each in (misses, [factor * m for m in misses]))
    assert twice.factor == pytest.approx(factor * once.factor, rel=1e-6)
    assert once.clusters == len(misses) and min(misses) / 2 < once.factor


def test_widths_hold_clusters_that_are_drawn_from_the_model() -> None:
    """Half widths of clusters are lognormal, rows normal: those of new clusters lie inside as often as they should."""
    random = np.random.default_rng(0)

    def drawn(count: int) -> list[JudgedRow]:
        rows = []
        for number in range(count):
            errors = random.normal(0.0, math.exp(random.normal(0.3, 0.5)) / 1.645, 20)
            values = [(1.1**error, 1.0, 1 / 1.1, 1.1, 2.0) for error in errors]
            rows += made(f"cluster {number}", f"cluster {number}/a", values)
        return rows

    width = widths_by_cell(drawn(15))["collective on other devices"].factor
    assert np.mean([row.miss <= width for row in drawn(300)]) == pytest.approx(0.9, abs=0.04)


def test_nine_clusters_are_enough_for_conformal_prediction_and_eight_are_not() -> None:
    misses = [0.5, 1.0, 2.0, 3.0, 0.1, 0.2, 0.3, 0.4]
    assert conformal_widths(clusters(misses)) == {"collective on other devices": math.inf}
    assert conformal_widths(clusters([*misses, 0.6])) == {"collective on other devices": pytest.approx(3.0)}


def test_a_cluster_is_widened_by_what_the_others_miss() -> None:
    rows = clusters([0.5, 2.0])
    first, second = widened_by_others(rows)
    assert math.log(first.high) / math.log(1.1) == pytest.approx(widths_by_cell(rows[1:])[rows[1].cell].factor)
    assert math.log(second.high) / math.log(1.1) == pytest.approx(widths_by_cell(rows[:1])[rows[0].cell].factor)
    assert first.miss < 0.5 / 1.5 and [row.predicted for row in (first, second)] == [1.0, 1.0]


def test_parts_are_predicted_alike_by_processes() -> None:
    cases = [CASES["cs336-allreduce"], CASES["bcaffe-steps"]]
    here = [row.values() for row in judged(cases, SETS)]
    with ProcessPoolExecutor(1) as pool:
        assert [row.values() for row in judged(cases, SETS, executor=pool)] == here


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('dataset = "example"', 'dataset = "exampel"', "unknown dataset 'exampel'"),
        ('hold_out = ["devices"]', 'hold_out = ["device"]', "unknown column 'device'"),
        ('plan = { algorithm = "nccl" }', 'plan = { algoritm = "nccl" }', "unknown field of a plan 'algoritm'"),
        ('quantity = "collective"', 'quantity = "step"', "without models or machines"),
        ("[fold]", 'free = { "link.latency" = 1e-6 }', "unknown free number 'link.latency'"),
        ("[fold]", "free = { compute = 0.0 }", "begins at 0.0"),
        ("[fold]", "free = { compute = inf }", "begins at inf"),
        ("[fold]", 'models.x = { profile = "resnet50", tensors = nan }', "tensors of a model is nan"),
    ],
)
def test_a_case_that_names_what_does_not_exist_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "cases").mkdir()
    text = (EXAMPLE / "cases" / "example.toml").read_text() + "[fold]"
    (tmp_path / "cases" / "case.toml").write_text(text.replace(old, new).replace("[fold]", ""))
    with pytest.raises(FileFormatError, match=said):
        read_cases(read_sets(EXAMPLE), tmp_path)


def test_the_median_with_weights_is_the_median_without_where_all_weigh_the_same() -> None:
    rows = made("one", "one/a", [(1.0, 1 + error, 0.1, 9.0, 2.0) for error in (0.1, 0.2, 0.4, 0.8)])
    (score,) = score_sets(rows)
    assert score.median_abs_error == pytest.approx(float(np.median([0.1, 0.2, 0.4, 0.8])))
