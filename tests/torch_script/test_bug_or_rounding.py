"""Bug or rounding: what is named for which difference, and a real script with a mistake and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dpsim.errors import ConfigError
from dpsim.experiments.bug_or_rounding import (
    ACCUMULATING_CLEAN,
    ACCUMULATING_MISTAKES,
    BY_DESIGN,
    CLEAN,
    MISTAKES,
    NARROW_CLEAN,
    NARROW_MISTAKES,
    Case,
    narrow,
)
from dpsim.harness.reproduce import script, script_judge
from dpsim.harness.reproduce.script_verdict import Compared, Verdict
from dpsim.torch.script.probe.reproduce.report import (
    KINDS,
    Loader,
    MicroBatch,
    RankReport,
    RankStep,
    write_report,
    write_shards,
    write_step,
)
from dpsim.torch.script.reproduce import differences
from dpsim.torch.script.reproduce.causes import finding_among_ranks, first_finding
from dpsim.torch.script.reproduce.differences import Finding
from dpsim.torch.script.reproduce.observation import Observed, Run, read_step
from dpsim.torch.script.reproduce.repetitions import repeats_its_order, same_order, too_fast
from dpsim.torch.script.reproduce.rounding import ALLOWANCE, Rounding, rounding_of
from dpsim.torch.script.reproduce.sixteen_bits import with_scaler
from dpsim.torch.script.reproduce.weights import parts_of_one

Dpsim = Callable[..., tuple[int, str, str]]
WEIGHT = "head.weight"
RNG = np.random.default_rng(0)
OF_SAMPLES = RNG.normal(size=(8, 50))
"""The gradient of each of eight samples."""
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def rank(samples: tuple[int, ...], reduced: np.ndarray | None = None) -> RankStep:
    local = OF_SAMPLES[list(samples)].mean(axis=0).astype(np.float32)
    got = local if reduced is None else reduced.astype(np.float32)
    batch = MicroBatch(rows=samples, indices=samples, data_size=8)
    return RankStep(
        loss=1.0,
        micro_batches=[batch],
        begun={WEIGHT: 1},
        local={WEIGHT: local},
        reduced={WEIGHT: got},
        final={WEIGHT: got},
        final_hashes={WEIGHT: hash(got.tobytes())},
    )


def written(step: RankStep) -> RankStep:
    """The step with the formats and bytes of its arrays, as a rank writes it."""
    kinds = {kind: {name: ("f4", each.tobytes()) for name, each in getattr(step, kind).items()} for kind in KINDS}
    return replace(step, **kinds)


def observed(folder: Path, *ranks: RankStep, null: int = 0, wrapper: str = "DDP") -> Observed:
    """A run of one step."""
    folder.mkdir()
    for number, step in enumerate(ranks):
        write_step(folder, number, 0, written(step))
    loader = Loader(batch_size=8 // len(ranks), data_size=8, sampler_size=8 // len(ranks))
    names = tuple({WEIGHT: 0, **ranks[0].local})
    report = RankReport(steps=1, parameters=names, loaders=(loader,), wrapper=wrapper)
    return Observed(Run(folder=folder.name, devices=len(ranks), null_seed=null), folder, (report,) * len(ranks))


def mean(*parts: tuple[int, ...]) -> np.ndarray:
    return np.mean([OF_SAMPLES[list(samples)].mean(axis=0) for samples in parts], axis=0)


def runs(tmp_path: Path, *ranks: RankStep, one: RankStep | None = None) -> tuple[Observed, Observed, Rounding]:
    """The run on one device, the one on these ranks, and what rounding explains."""
    first = observed(tmp_path / "first", one or rank(ORDER))
    shuffled = rank(ORDER, mean(ORDER) * (1 + 1e-7))
    rounding = rounding_of(first, [observed(tmp_path / "null", shuffled, null=1)])
    return first, observed(tmp_path / "other", *ranks), rounding


def finding(tmp_path: Path, *ranks: RankStep, one: RankStep | None = None) -> Finding | None:
    return first_finding(*runs(tmp_path, *ranks, one=one))


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    step = rank(ORDER)
    write_step(tmp_path, 1, 3, written(step))
    again = read_step(tmp_path, 1, 3)
    assert again.micro_batches == step.micro_batches and again.samples == 8
    assert np.array_equal(again.local[WEIGHT], step.local[WEIGHT])


HALVES = (0, 1, 2, 3), (4, 5, 6, 7)


def test_the_mean_of_halves_differs_by_rounding(tmp_path: Path) -> None:
    assert finding(tmp_path, *(rank(half, mean(*HALVES)) for half in HALVES)) is None


@pytest.mark.parametrize(
    ("shares", "reduced", "kind"),
    [
        (((0, 1, 2, 3), (0, 1, 2, 3)), None, differences.REPEATED),
        (((0, 1, 2, 3), (2, 5, 6, 7)), None, differences.SEEDS),
        (((0, 1, 2, 3, 4), (5, 6, 7)), None, differences.SHARES),
        (HALVES, 2 * mean(*HALVES), differences.SCALE),
        (HALVES, mean(*HALVES) + np.eye(50)[7], differences.OVERWRITTEN),
    ],
)
def test_the_class_of_a_mistake_is_named(
    tmp_path: Path, shares: tuple[tuple[int, ...], ...], reduced: np.ndarray | None, kind: str
) -> None:
    got = mean(*shares) if reduced is None else reduced
    found = finding(tmp_path, *(rank(share, got) for share in shares))
    assert found is not None and found.kind == kind and found.is_mistake and found.step == 1


@pytest.mark.parametrize("got", [mean((0, 1, 2, 3, 4), (5, 6, 7)), 2 * mean(*HALVES), mean(*HALVES) + np.eye(50)[7]])
def test_the_largest_difference_is_at_least_that_of_what_is_not_rounding(tmp_path: Path, got: np.ndarray) -> None:
    compared = script_judge.compare_runs(*runs(tmp_path, *(rank(half, got) for half in HALVES)))
    assert compared.finding is not None and compared.largest is not None and compared.largest > ALLOWANCE


@pytest.mark.parametrize(
    ("shards", "counts"),
    [
        ((range(0, 30), range(20, 50)), (10, 0)),
        ((range(25), [*range(20, 25), *range(30, 50)]), (5, 5)),
        ((range(0, 25), range(25, 50)), None),
        (([*range(25), 3], range(25, 50)), None),
        (([each // 3 for each in range(45)], range(45)), None),
    ],
    ids=["by seeds", "by seeds, few", "divided", "padded", "with replacement"],
)
def test_shards_of_an_epoch_decide_whatever_a_step_shares(
    tmp_path: Path, shards: tuple[Sequence[int], ...], counts: tuple[int, int] | None
) -> None:
    runs = [
        observed(tmp_path / "first", rank(ORDER)),
        observed(tmp_path / "other", *(rank(half, mean(*HALVES)) for half in HALVES)),
    ]
    for run, parts in zip(runs, ([range(50)], shards), strict=True):
        for number, part in enumerate(parts):
            write_shards(run.folder, number, {1: list(part)}, {1: 50})
    found = first_finding(*runs, rounding_of(runs[0], []))
    if counts is None:
        assert found is None
    else:
        repeated, never = counts
        assert found is not None and found.kind == differences.SEEDS
        assert f"of 50 samples {repeated} train more than once in an epoch, and {never} never" in found.because


def by_value(samples: tuple[int, ...], rows: tuple[int, ...], reduced: np.ndarray | None = None) -> RankStep:
    """A rank whose samples came from no data loader."""
    return replace(rank(samples, reduced), micro_batches=[MicroBatch(rows=rows)])


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (((1, 1, 1, 1), (1, 1, 1, 1)), differences.OTHER_SAMPLES),
        (((1, 1, 1, 1), (2, 2, 2, 2)), differences.OTHER_SAMPLES),
        (((1, 2, 3, 4), (3, 4, 5, 6)), differences.OTHER_SAMPLES),
        (((1, 2, 3, 4), (1, 2, 3, 4)), differences.REPEATED),
    ],
)
def test_what_equals_in_value_alone_is_not_the_same_sample(
    tmp_path: Path, rows: tuple[tuple[int, ...], ...], kind: str
) -> None:
    ranks = [by_value(half, own, mean(*HALVES)) for half, own in zip(HALVES, rows, strict=True)]
    found = finding(tmp_path, *ranks, one=by_value(ORDER, tuple(range(11, 19))))
    assert found is not None and found.kind == kind


@pytest.mark.parametrize("both", [True, False])
def test_a_loss_that_is_not_a_number_is_a_mistake_on_several_devices_alone(tmp_path: Path, both: bool) -> None:
    ranks = [replace(rank(half, mean(*HALVES)), loss=float("nan")) for half in HALVES]
    found = finding(tmp_path, *ranks, one=replace(rank(ORDER), loss=float("nan" if both else 1.0)))
    assert found is None if both else found is not None and found.kind == differences.NOT_A_NUMBER


def test_a_wrapper_that_is_bypassed_leaves_a_gradient_missing(tmp_path: Path) -> None:
    steps = [replace(rank(half), bypassed=True, micro_batches=[]) for half in (ORDER, *HALVES)]
    found = finding(tmp_path, *steps[1:], one=steps[0])
    assert found is not None and found.kind == differences.MISSING and "not by what DDP returned" in found.because


@pytest.mark.parametrize("weights", [[0.508, 0.488], [0.2, 0.3, 0.5], [0.3337, 0.3331, 0.3332]])
def test_weights_of_a_mean_are_printed_so_that_they_add_to_1(weights: list[float]) -> None:
    printed = parts_of_one(weights)
    assert sum(printed) == pytest.approx(1.0, abs=1e-12)
    assert max(abs(a - b) for a, b in zip(printed, weights, strict=True)) < 0.01


def test_a_gradient_that_is_not_reduced_is_missing(tmp_path: Path) -> None:
    found = finding(tmp_path, *map(rank, HALVES))
    assert found is not None and (found.kind, found.tensor) == (differences.MISSING, WEIGHT)


def test_ranks_that_begin_apart_have_seeds_of_their_own(tmp_path: Path) -> None:
    ranks = [rank(half, mean(*HALVES)) for half in HALVES]
    found = finding(tmp_path, ranks[0], replace(ranks[1], begun={WEIGHT: 2}))
    assert found is not None and found.kind == differences.SEEDS


def test_a_loss_that_ranks_add_is_a_sum_though_the_gradients_are_right(tmp_path: Path) -> None:
    ranks = [replace(rank(half, mean(*HALVES)), loss=2.0, adds=True) for half in HALVES]
    found = finding(tmp_path, *ranks)
    assert found is not None and (found.kind, found.tensor) == (differences.SCALE, "the loss")


def twice(*, clipped: float = 1.0, final: float = 1.0) -> list[RankStep]:
    """Two ranks whose gradients are twice the right ones, and what their optimizers get, of which part clipping is."""
    ranks = [replace(rank(half, mean(*HALVES) * 2), loss=2.0, clipped={WEIGHT: clipped}) for half in HALVES]
    for step in ranks:
        step.local[WEIGHT] = step.local[WEIGHT] * 2
        step.final = {WEIGHT: (mean(*HALVES) * final).astype(np.float32)}
        step.final_hashes = {WEIGHT: 3}
    return ranks


def test_gradients_that_are_corrected_after_backward_are_right_whatever_the_loss(tmp_path: Path) -> None:
    """As where a script divides them by the tokens of all ranks, which it counts after its backward."""
    assert finding(tmp_path, *twice()) is None


def test_a_scaled_loss_shows_though_the_norm_of_its_gradients_is_clipped(tmp_path: Path) -> None:
    one = replace(rank(ORDER), final={WEIGHT: rank(ORDER).final[WEIGHT] / 10}, clipped={WEIGHT: 0.1})
    found = finding(tmp_path, *twice(clipped=0.05, final=0.1), one=one)
    assert found is not None and found.kind == differences.SCALE and "2 times" in found.because


def test_ranks_that_clip_before_they_reduce_have_norms_of_their_own(tmp_path: Path) -> None:
    ranks = [
        replace(rank(half, mean(*HALVES)), reduced={}, clipped={WEIGHT: factor})
        for half, factor in zip(HALVES, (0.5, 0.25), strict=True)
    ]
    found = finding(tmp_path, *ranks, one=replace(rank(ORDER), reduced={}))
    assert found is not None and found.kind == differences.OWN_NORM and "0.5 and 0.25" in found.because


def test_a_term_of_the_loss_with_its_own_divisor_is_named_by_its_tensor(tmp_path: Path) -> None:
    """Of two tensors the gradient of the second is of a term whose shares are unequal."""
    bias, parts = "head.bias", ((0, 1, 2, 3, 4), (5, 6, 7))
    one = with_second(rank(ORDER), bias, mean(ORDER), mean(ORDER))
    ranks = [
        with_second(rank(half, mean(*HALVES)), bias, mean(part), mean(*parts))
        for half, part in zip(HALVES, parts, strict=True)
    ]
    found = finding(tmp_path, *ranks, one=one)
    assert found is not None and found.kind == differences.SHARES
    assert "of the gradient of head.bias with weights 0.625, 0.375" in found.because


def with_second(step: RankStep, name: str, local: np.ndarray, reduced: np.ndarray) -> RankStep:
    """The step with the gradient of a second tensor."""
    for kind, values in ((step.local, local), (step.reduced, reduced), (step.final, reduced)):
        kind[name] = values.astype(np.float32)
    return step


def test_gradients_of_which_no_mean_is_right_are_of_a_loss_of_each_ranks_own_samples(tmp_path: Path) -> None:
    bend = RNG.normal(size=50)
    ranks = [rank(half, mean(*HALVES) + bend) for half in HALVES]
    for step in ranks:
        step.local[WEIGHT] = (step.local[WEIGHT] + bend).astype(np.float32)
    found = finding(tmp_path, *ranks)
    assert found is not None and found.kind == differences.OWN_LOSS


def test_ranks_that_update_apart_are_a_mistake_on_any_samples(tmp_path: Path) -> None:
    ranks = [replace(rank(half), micro_batches=[MicroBatch(rows=half)]) for half in HALVES]
    first, other, rounding = runs(tmp_path, *ranks, one=by_value(ORDER, tuple(range(11, 19))))
    found = first_finding(first, other, rounding)
    assert found is not None and found.kind == differences.OTHER_SAMPLES
    alone = finding_among_ranks(first, other, rounding)
    assert alone is not None and alone.kind == differences.MISSING


def of_steps(folder: Path, *steps: RankStep, devices: int = 1) -> Observed:
    """A run with these steps on each rank."""
    folder.mkdir()
    for number, step in enumerate(steps):
        for rank_number in range(devices):
            write_step(folder, rank_number, number, written(step))
    loader = Loader(batch_size=2, data_size=8, sampler_size=8 // devices, sampler="DistributedSampler")
    report = RankReport(steps=len(steps), parameters=(WEIGHT,), loaders=(loader,))
    return Observed(Run(folder=folder.name, devices=devices), folder, (report,) * devices)


@pytest.mark.parametrize(
    ("rates", "kind"),
    [
        ((0.2, 0.6, 1.0), differences.TOO_FAST),
        ((0.2, 0.4, 0.6), None),
        ((0.4, 0.8, 1.2), None),
        ((0.2, 0.5, 0.5), None),
    ],
    ids=["stepped twice", "the same", "scaled", "another"],
)
def test_a_schedule_that_is_stepped_by_each_rank_runs_too_fast(
    tmp_path: Path, rates: tuple[float, ...], kind: str | None
) -> None:
    ours = [replace(rank(ORDER), settings={"lr": rate}) for rate in (0.2, 0.4, 0.6, 0.8, 1.0)]
    theirs = [replace(rank(ORDER), settings={"lr": rate}) for rate in (*rates, 0.0, 0.0)]
    found = too_fast(of_steps(tmp_path / "1", *ours), of_steps(tmp_path / "2", *theirs, devices=2))
    assert (found and found.kind) == kind


def epochs(*orders: tuple[int, ...]) -> list[RankStep]:
    """A step for each epoch, with the samples of its only batch."""
    batches = [MicroBatch(rows=order, epoch=epoch, indices=order, data_size=8) for epoch, order in enumerate(orders)]
    return [replace(rank(ORDER), micro_batches=[batch]) for batch in batches]


@pytest.mark.parametrize(
    ("before", "after", "repeats"),
    [
        (((5, 2), (2, 7)), ((3, 1), (3, 1)), True),
        (((5, 2), (2, 7)), ((1, 3), (1, 3)), False),
        (((5, 2), (2, 7)), ((3, 1), (1, 2)), False),
        (((5, 2), (5, 2)), ((3, 1), (3, 1)), False),
    ],
    ids=["the first order again", "not shuffled", "shuffled", "as in the first run"],
)
def test_epochs_of_one_order_are_named_where_the_first_run_shuffles_each(
    tmp_path: Path, before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...], repeats: bool
) -> None:
    first = of_steps(tmp_path / "1", *epochs(*before))
    second = of_steps(tmp_path / "2", *epochs(*after), devices=2)
    found = same_order(first, second)
    assert (found is not None) == repeats
    shuffled_once = after[0] == after[1] and list(after[0]) != sorted(after[0])
    assert repeats_its_order(second) == shuffled_once


def test_random_numbers_of_the_loop_are_no_mistake(tmp_path: Path) -> None:
    ranks = [rank(half, mean(*HALVES)) for half in HALVES]
    for step in ranks:
        step.draws = True
        for values in (step.local, step.reduced, step.final):
            values[WEIGHT] = np.ones(50, np.float32)
        step.final_hashes = {WEIGHT: 1}
    found = finding(tmp_path, *ranks)
    assert found is not None and found.kind == differences.RANDOM and not found.is_mistake
    assert Verdict(Run(folder="", devices=1), ()).finding is None


BY_CLOSURE = """\
def closure():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    [each.grad.add_(rank) for each in model.parameters()]
optimizer.step(closure)"""
"""Forward and backward within the optimizer's step, as in Lightning's Trainer, and a mistake after them."""


LOOKING_AHEAD = {
    "top": """\
def ahead(loader):
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch""",
    "model": "model = nn.Sequential(nn.Linear(16, 48), nn.Dropout(0.3), nn.Linear(48, 5))",
    "loader": "batches = DataLoader(data, batch_size=32, sampler=sampler)",
    "epoch": "loader = ahead(batches)",
}
"""Gets the next batch before it trains on one, as Accelerate's loaders do, and draws a mask for each sample."""


SHARDS = {
    "top": """\
class Shard(torch.utils.data.BatchSampler):
    def __init__(self, batches, rank, world):
        self.batches, self.rank, self.world, self.batch_size = batches, rank, world, batches.batch_size
    def __len__(self):
        return len(self.batches) // self.world
    def __iter__(self):
        yield from list(self.batches)[self.rank::self.world]""",
    "loader": """\
loader = DataLoader(data, batch_size=32, shuffle=True)
batches = loader.batch_sampler
if world > 1:
    loader.sampler.generator = torch.Generator().manual_seed(7)
    batches = Shard(batches, rank, world)
loader = DataLoader(data, batch_sampler=batches)""",
}
"""Replaces the script's loader on several ranks by one that deals out its batches, as Accelerate does."""


SUBSETS = {
    "data": """\
data = TensorDataset(torch.randn(128, 16), torch.randint(0, 5, (128,)))
one_seed = torch.Generator().manual_seed(3)
data = torch.utils.data.random_split(data, [128 // world] * world, generator=one_seed)[rank]""",
    "sampler": "sampler = None",
}
"""Each rank has a part of the data that lacks samples which it gets in the order of the first run."""


OWN_TEACHER = {
    "more": "torch.manual_seed(rank)\nteacher = nn.Linear(16, 5)",
    "step": "optimizer.zero_grad()\nF.mse_loss(model(x), teacher(x).detach()).backward()\noptimizer.step()",
}


GATHERED = {
    "step": """\
optimizer.zero_grad()
out = model(x)
parts = [torch.zeros_like(out) for _ in range(world)]
dist.all_gather(parts, out)
parts[rank] = out
(F.cross_entropy(out, y) + torch.cat(parts).norm(dim=0).sum()).backward()
optimizer.step()""",
}


DRAWN_WITH_A_HEAD = {
    "model": "body, head = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 5)",
    "wrap": "body = DDP(body)",
    "optimizer": "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)",
    "more": "torch.manual_seed(rank)",
    "step": """\
x = torch.randn(8, 16)
optimizer.zero_grad()
F.cross_entropy(head(body(x)), x.abs()[:, :5].softmax(1)).backward()
optimizer.step()""",
}
"""Batches that cannot be compared with those on one device, and a mistake that ranks show by themselves."""


def named(name: str) -> Case:
    return next(each for each in (*MISTAKES, *BY_DESIGN, *CLEAN, *NARROW_MISTAKES, *NARROW_CLEAN) if each.name == name)


def test_every_planted_mistake_is_of_a_class_that_can_be_named() -> None:
    classes = {value for name, value in vars(differences).items() if name.isupper() and isinstance(value, str)}
    assert {case.kind for case in (*MISTAKES, *NARROW_MISTAKES, *ACCUMULATING_MISTAKES)} <= classes
    assert all(case.kind in classes or case.design for case in BY_DESIGN)
    assert {case.kind for case in CLEAN} == {""}


IS_ROUNDING = "The difference is rounding in all 2 steps."


def judged(dpsim: Dpsim, folder: Path, case: Case, devices: str = "1,2", steps: int = 2) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(case.script, encoding="utf-8")
    code, out, err = dpsim("reproduce", "--torch-script", script, "--devices", devices, "--steps", steps)
    assert "Traceback" not in err, err
    return code, out


@pytest.mark.torch
@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (named("a sum as the loss"), 1, "Not rounding: step 1 on 2 devices, 4.bias, differs by 0.5 of its size"),
        (named("the ordinary script"), 0, IS_ROUNDING),
        (
            named("FSDP: a mean over unequal numbers of tokens"),
            1,
            "and FSDP takes 1/2 of each (class: means of unequal",
        ),
        (named("a method of the module"), 1, "and not by what DDP returned (class: a missing gradient)"),
        (named("batches that the loop draws without a seed"), 0, "draws its samples without a seed"),
        (named("a loss that is not a number"), 0, "The loss is nan from step 1 on, on 1 device too"),
        (Case("a mistake in a closure", {"step": BY_CLOSURE}), 1, "Not rounding: step 1 on 2 devices"),
        (
            Case("a sum, looking ahead", {**LOOKING_AHEAD, "step": named("a sum as the loss").parts["step"]}),
            1,
            "a sum in place of a mean",
        ),
        (Case("a teacher by rank", OWN_TEACHER), 1, "of Linear, outside of DDP (class: seeds by rank)"),
        (Case("features of all ranks", GATHERED), 1, "functional.all_gather carries it (class: a missing gradient)"),
        (Case("subsets of the ranks", SUBSETS), 0, IS_ROUNDING.replace(".", ", apart from what differs by design.")),
        (Case("a library's shards", SHARDS), 0, IS_ROUNDING.replace(".", ", apart from what differs by design.")),
        (Case("a closure", {"step": BY_CLOSURE.replace("(rank)", "(0)")}), 0, IS_ROUNDING),
        (named("gradients that are divided by all tokens after backward"), 0, IS_ROUNDING),
        (named("a head outside of DDP that the script reduces"), 0, IS_ROUNDING),
        (named("negatives of all ranks, the loss times their number"), 0, IS_ROUNDING),
        (named("negatives of each rank's own"), 1, "(class: a loss of each rank's own samples)"),
        (named("clipped before the script reduces"), 1, "(class: a norm of each rank's own)"),
        (
            named("a centre of each rank's own, in a loss outside of DDP"),
            1,
            "step 2 on 2 devices, 4.bias, differs",
        ),
        (Case("drawn by each rank, a head outside of DDP", DRAWN_WITH_A_HEAD), 1, "(class: a missing gradient)"),
    ],
)
def test_a_script_is_judged(dpsim: Dpsim, tmp_path: Path, case: Case, code: int, words: str) -> None:
    found = judged(dpsim, tmp_path, case)
    assert found[0] == code and words in found[1], found


QUICK = (
    "gradients cleared in each micro-batch",
    "unequal numbers of tokens",
    "each pass of the ordinary loop",
    "batch norm",
)


@pytest.mark.torch
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.name.endswith(QUICK) else pytest.mark.slow, id=case.name)
        for case in (*ACCUMULATING_MISTAKES, *ACCUMULATING_CLEAN)
    ],
)
def test_micro_batches_of_the_same_samples_are_compared(dpsim: Dpsim, tmp_path: Path, case: Case) -> None:
    """A script takes their number as an argument; without that, each pass of its loop becomes one."""
    script = tmp_path / "train.py"
    script.write_text(case.script, encoding="utf-8")
    flags = ("--torch-script", script, "--accumulate", "1,2", "--steps", "2")
    code, out, err = dpsim("reproduce", *flags, *(["--", *case.arguments] if case.arguments else []))
    assert "Traceback" not in err, err
    assert (code, f"(class: {case.kind})" in out) == ((1, True) if case.kind else (0, False)), out
    assert case.design in out and "2 devices, 2 micro-batches" in out


@pytest.mark.torch
def test_a_script_that_accumulates_by_itself_is_told_how_it_gets_its_number(dpsim: Dpsim, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = ACCUMULATING_CLEAN[0].script.replace("int(sys.argv[1])", "2")
    script.write_text(text, encoding="utf-8")
    code, _, err = dpsim("reproduce", "--torch-script", script, "--accumulate", "1,2", "--steps", "2")
    assert code == 2 and "accumulates by itself" in err and "gives it the number for {accumulate}" in err


@pytest.mark.torch
def test_shards_of_any_number_of_ranks_are_compared_whole(dpsim: Dpsim, tmp_path: Path) -> None:
    """Five rows of the last layer are no multiple of the ranks, and AdamW's states and the clipped norm are shards."""
    code, out = judged(dpsim, tmp_path, named("FSDP: several units, AdamW, the norm clipped"), "2,1,4")
    assert code == 0 and IS_ROUNDING in out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each for each in (*MISTAKES, *CLEAN) if "FSDP" in each.name], ids=lambda case: case.name
)
def test_scripts_with_fully_shard_are_judged_as_those_with_ddp(dpsim: Dpsim, tmp_path: Path, case: Case) -> None:
    code, out = judged(dpsim, tmp_path, case, steps=4)
    assert (code, f"(class: {case.kind})" in out) == ((1, True) if case.kind else (0, False)), out


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "given"),
    [
        (", offload_policy=fsdp.CPUOffloadPolicy()", "offloads to the host, which is not compared"),
        ("[0]); fully_shard(model[2]", "two models"),
        ("); model.set_requires_gradient_sync(False", "FSDP has reduced no gradient"),
        ("); model.parameters = (lambda: early", "builds its optimizer before fully_shard"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(dpsim: Dpsim, tmp_path: Path, wrap: str, given: str) -> None:
    script = tmp_path / "train.py"
    sharded = {
        "top": "from torch.distributed import fsdp\nfrom torch.distributed.fsdp import fully_shard",
        "wrap": f"early = list(model.parameters())\nfully_shard(model{wrap})",
    }
    script.write_text(Case("", sharded).script, encoding="utf-8")
    code, _, err = dpsim("reproduce", "--torch-script", script, "--devices", "1,2", "--steps", "1")
    assert code == 2 and given in err and "Traceback" not in err, err


@pytest.mark.torch
def test_a_parameter_that_is_replaced_behind_ddp_is_named_with_its_line(dpsim: Dpsim, tmp_path: Path) -> None:
    case = Case("", {"more": "model.module[4].weight = nn.Parameter(torch.ones(5, 32))"})
    script = tmp_path / "train.py"
    script.write_text(case.script, encoding="utf-8")
    (line,) = [number for number, text in enumerate(case.script.splitlines(), 1) if "torch.ones" in text]
    code, _, err = dpsim("reproduce", "--torch-script", script, "--devices", "1,2", "--steps", "1")
    assert code == 2 and f"train.py:{line} replaces the parameter 4.weight after Distributed" in err, err
    assert "Traceback" not in err


IN_BOTH = "It shows with autocast to bfloat16, and in float32."


@pytest.mark.torch
@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (
            named("clipped before unscale_"),
            1,
            "gets 1.53e-05 times the gradients that it gets without a scaler, and backward's are those times the scale:"
            " they are clipped while scaled (class: clipping before unscale_). It shows in float32 alone, not with",
        ),
        (named("an overflow that each rank decides alone"), 1, "rank 1 skips its update, for its gradients overflow"),
        (
            named("FSDP: a policy without reduce_dtype"),
            1,
            "(class: a reduction in 16 bits). It shows with MixedPrecisionPolicy with param_dtype bfloat16 alone",
        ),
        (narrow(named("a sum as the loss")), 1, f"(class: a sum in place of a mean). {IN_BOTH}"),
        (
            narrow(named("FSDP: several units, AdamW, the norm clipped")),
            0,
            "with MixedPrecisionPolicy with param_dtype bfloat16 and autocast to bfloat16 and in float32.",
        ),
    ],
)
def test_a_script_that_computes_in_16_bits_is_judged_twice(
    dpsim: Dpsim, tmp_path: Path, case: Case, code: int, words: str
) -> None:
    found = judged(dpsim, tmp_path, case)
    assert found[0] == code and words in found[1], found


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("case", [*NARROW_MISTAKES, *NARROW_CLEAN], ids=lambda case: case.name)
def test_mistakes_that_only_16_bits_have_are_named_and_their_corrections_are_rounding(
    dpsim: Dpsim, tmp_path: Path, case: Case
) -> None:
    code, out = judged(dpsim, tmp_path, case, steps=4)
    assert (code, f"(class: {case.kind})" in out) == ((1, True) if case.kind else (0, False)), out


def with_report(run: Observed, **fields: object) -> Observed:
    """The run with these fields in the reports of its ranks."""
    return replace(run, reports=tuple(replace(each, **fields) for each in run.reports))


def test_what_differs_by_design_is_said_once_of_both_judgements(tmp_path: Path) -> None:
    one, two, _ = runs(tmp_path, *[rank(half, mean(*HALVES)) for half in HALVES])
    padded = Loader(batch_size=4, data_size=7, sampler_size=4, sampler="DistributedSampler")
    two = with_report(two, loaders=(padded,))
    in_float32 = replace(two, run=msgspec.structs.replace(two.run, in_float32=True))
    said = script_judge._designs(one, two)
    assert len(said) == 1 and "1 of 7 samples" in said[0] and script_judge._designs(one, in_float32) == said


def bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({}, differences.REDUCED_NARROW), ({"sent_as": "bfloat16"}, None), ({"narrow": {WEIGHT: "bfloat16"}}, None)],
    ids=["not said", "by the policy", "as the parameter is"],
)
def test_a_reduction_in_16_bits_is_a_mistake_unless_the_script_says_so(
    tmp_path: Path, fields: dict[str, object], kind: str | None
) -> None:
    first = observed(tmp_path / "first", rank(ORDER))
    null = observed(tmp_path / "null", rank(ORDER, mean(ORDER) * 1.001), null=1)
    other = observed(tmp_path / "other", *(rank(half, bfloat16(mean(*HALVES))) for half in HALVES))
    found = first_finding(first, with_report(other, **fields), rounding_of(first, [null]))
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize("skipping", [(True, False), (True, True)])
def test_ranks_skip_an_update_together(tmp_path: Path, skipping: tuple[bool, ...]) -> None:
    ranks = [replace(rank(half, mean(*HALVES)), skipped=skips) for half, skips in zip(HALVES, skipping, strict=True)]
    found = finding(tmp_path, *ranks)
    assert (None if found is None else found.kind) == (None if all(skipping) else differences.OVERFLOW)


@pytest.mark.parametrize(
    ("fields", "lost", "kind"),
    [
        ({}, 0.4, differences.LOST),
        ({"narrow_norms": (WEIGHT,)}, 0.4, differences.NARROW_NORMS),
        ({"narrow_norms": ("norm.running_var",)}, 0.0, differences.NARROW_NORMS),
        ({}, 0.01, None),
    ],
)
def test_what_is_kept_in_16_bits_loses_updates(
    tmp_path: Path, fields: dict[str, object], lost: float, kind: str | None
) -> None:
    ranks = [replace(rank(half, mean(*HALVES)), lost={WEIGHT: lost}) for half in HALVES]
    first, other, rounding = runs(tmp_path, *ranks)
    types = {"narrow": {WEIGHT: "bfloat16", "norm.running_var": "bfloat16"}}
    found = first_finding(first, with_report(other, **types, **fields), rounding)
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize(
    ("backward", "final", "kind"),
    [
        (64.0, 1.0, None),
        (64.0, 0.01, differences.CLIPPED_SCALED),
        (64.0, 64.0, differences.NOT_UNSCALED),
        (64.0**2, 64.0, differences.SCALED_TWICE),
        (1.0, 1 / 64.0, differences.UNKNOWN),
    ],
)
def test_a_scaler_leaves_the_gradients_of_the_optimizer_alone(
    tmp_path: Path, backward: float, final: float, kind: str | None
) -> None:
    plain, scaled = rank(ORDER), replace(rank(ORDER), scale=64.0)
    scaled.reduced, scaled.final = {WEIGHT: plain.reduced[WEIGHT] * backward}, {WEIGHT: plain.final[WEIGHT] * final}
    first = observed(tmp_path / "first", plain)
    found = with_scaler(first, observed(tmp_path / "scaled", scaled), rounding_of(first, []))
    assert (None if found is None else found.kind) == kind


def test_a_mistake_is_named_by_the_judgement_in_float32_and_both_are_said() -> None:
    in_bfloat16 = Finding("2 devices", 1, WEIGHT, differences.SHARES, "of one", 0.3, 0.01)
    in_float32 = replace(in_bfloat16, run="2 devices in float32", kind=differences.SCALE)
    both = [
        Compared(Run(folder="", devices=2, in_float32=number == 1), 8, 8, 30.0, each, ())
        for number, each in enumerate((in_bfloat16, in_float32))
    ]
    rounding = [replace(each, finding=None) for each in both]
    sentences = [
        Verdict(Run(folder="", devices=1), compared, ("autocast to bfloat16",)).sentence
        for compared in ((both[0], both[1]), (both[0], rounding[1]), (rounding[0], both[1]), (both[0],))
    ]
    assert f"(class: {differences.SCALE}). {IN_BOTH}" in sentences[0]
    assert "It shows with autocast to bfloat16 alone, not in float32." in sentences[1]
    assert "It shows in float32 alone, not with autocast to bfloat16." in sentences[2]
    assert "It shows with autocast to bfloat16 (in float32 the script does not train)." in sentences[3]


def test_the_rank_that_raised_first_is_named_and_not_one_that_lost_it(tmp_path: Path) -> None:
    for number, given in enumerate(("Connection closed by peer [127.0.0.1]", "no labels on rank 1")):
        write_report(tmp_path, number, RankReport(error=(given, "", "")))
    with pytest.raises(ConfigError, match="no labels on rank 1"):
        script._observed_run(script.ScriptComparison(script="train.py"), Run(folder=".", devices=2), tmp_path)


def test_what_is_of_dpsims_own_training_is_refused(dpsim: Dpsim) -> None:
    code, _, err = dpsim("reproduce", "--torch-script", "train.py", "--set", "leaves=4")
    assert code == 2 and "--set leaves" in err
    code, _, err = dpsim("reproduce", "--script-may-write")
    assert code == 2 and "--torch-script" in err


def test_shards_that_are_scaled_by_different_numbers_have_norms_of_their_own(tmp_path: Path) -> None:
    ranks = [rank(half, mean(*HALVES)) for half in HALVES]
    scaled = ranks[0].final[WEIGHT] * np.repeat([0.5, 0.25], 25).astype(np.float32)
    for step in ranks:
        step.final, step.final_hashes = {WEIGHT: scaled}, {WEIGHT: 3}
    found = finding(tmp_path, *ranks)
    assert found is not None and found.kind == differences.OWN_NORM and "0.25 and 0.5" in found.because


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP"])
def test_only_micro_batches_that_fsdp_reduces_one_by_one_may_cancel(tmp_path: Path, wrapper: str) -> None:
    """Each is rounded before they are added, so that a small sum has an error of the size of its large parts."""
    near_zero = np.concatenate([[6e-8], mean(*HALVES)[1:]])
    ranks = [rank(half, near_zero) for half in HALVES]
    for step in ranks:
        step.local[WEIGHT][0] = 1e-9
        step.micro_batches = [two_samples(step, 0), two_samples(step, 2)]
    first = observed(tmp_path / "first", rank(ORDER, np.concatenate([[0.0], mean(ORDER)[1:]])))
    found = first_finding(first, observed(tmp_path / "other", *ranks, wrapper=wrapper), rounding_of(first, []))
    assert (found is None) == (wrapper == "FSDP")


def two_samples(step: RankStep, at: int) -> MicroBatch:
    """Two samples of a rank's only batch as a micro-batch."""
    two = step.micro_batches[0].indices[at : at + 2]
    return MicroBatch(rows=two, indices=two, data_size=8)
