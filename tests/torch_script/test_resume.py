"""A script that resumes on another number of devices: what is named as lost, and scripts that lose nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsim.experiments.resume_on import CLEAN, MISTAKES, Case
from dpsim.torch.script.reproduce import resumption
from dpsim.torch.script.reproduce.resumption import judge

Dpsim = Callable[..., tuple[int, str, str]]
Record = dict[str, Any]


def ranks(devices: int, order: list[int], trained: int, **fields: Any) -> list[Record]:
    """Return what ranks wrote that deal out an epoch one by one, in batches of 2, and train from batch ``trained``."""
    shards = [order[rank::devices] for rank in range(devices)]
    snapshot = {
        "parameters": {"weight": 1},
        "optimizer": {"exp_avg of weight": 2},
        "rates": [0.1],
        "schedulers": [["StepLR", 3]],
        "scalers": [],
        "random": 5,
    }
    return [
        {
            "checkpoint": 1,
            "steps": [{"batches": [[0, trained + step]], "random": step, "draws": False} for step in range(2)],
            "snapshots": {"first": copy.deepcopy(snapshot), "checkpoint": copy.deepcopy(snapshot)} | fields,
            "epochs": [
                {"batches": [shard[at : at + 2] for at in range(0, len(shard), 2)], "whole": True, "drops": False}
            ],
        }
        for shard in shards
    ]


def kinds(first: list[Record], second: list[Record]) -> list[str]:
    return [loss.kind for loss in judge(first, second).losses]


SHUFFLED = [5, 2, 14, 9, 0, 11, 7, 3, 15, 1, 8, 6, 13, 4, 10, 12]


@pytest.mark.parametrize(
    ("first", "second", "skipped", "kind"),
    [
        (2, 1, 2, None),
        (1, 2, 1, resumption.NEVER),  # both skip one batch on each rank, as in transformers#40245
        (4, 2, 1, resumption.TWICE),
        (4, 2, 0, resumption.TWICE),
        (4, 2, 2, None),
    ],
)
def test_what_is_left_of_an_epoch_is_trained_once(first: int, second: int, skipped: int, kind: str | None) -> None:
    judged = judge(ranks(first, SHUFFLED, 0), ranks(second, SHUFFLED, skipped))
    assert [loss.kind for loss in judged.losses] == ([] if kind is None else [kind]) and not judged.unknown
    assert kind is not resumption.NEVER or "2 are never trained after resuming, and 0 a second time" in str(judged)


def test_a_sampler_may_draw_the_rest_of_an_epoch_alone() -> None:
    first = ranks(1, SHUFFLED, 0)
    assert kinds(first, ranks(2, SHUFFLED[2:], 0)) == []
    assert kinds(first, ranks(2, SHUFFLED[6:], 0)) == [resumption.NEVER]
    assert kinds(first, ranks(2, SHUFFLED[:5:-1], 0)) == [resumption.RANDOM]


def test_another_order_of_an_epoch_is_a_random_state() -> None:
    assert kinds(ranks(2, SHUFFLED, 0), ranks(1, SHUFFLED[::-1], 2)) == [resumption.RANDOM]
    assert kinds(ranks(2, SHUFFLED, 0), ranks(1, SHUFFLED[::-1], 0)) == [resumption.NEVER]


def test_what_a_sampler_pads_is_no_second_time() -> None:
    order = SHUFFLED[:15]
    padded = [*order, order[0]]
    assert kinds(ranks(1, order, 0), ranks(2, padded, 1))[:1] == [resumption.NEVER]
    assert kinds(ranks(2, padded, 0), ranks(4, [*padded[4:], *padded[4:8]], 0)) == []


def test_samples_of_no_loader_are_not_known() -> None:
    first, second = ranks(2, SHUFFLED, 0), ranks(1, SHUFFLED, 2)
    second[0]["steps"][0]["batches"] = [[]]
    judged = judge(first, second)
    assert not judged.losses and "no data loader" in judged.unknown[0]


def test_a_state_that_each_rank_holds_in_part_may_be_divided_otherwise() -> None:
    first, second = ranks(2, SHUFFLED, 0), ranks(2, SHUFFLED, 1)
    first[0]["snapshots"]["checkpoint"]["optimizer"] = {"exp_avg of a": 1}
    first[1]["snapshots"]["checkpoint"]["optimizer"] = {"exp_avg of b": 2}
    second[0]["snapshots"]["first"]["optimizer"] = {"exp_avg of b": 2}
    second[1]["snapshots"]["first"]["optimizer"] = {"exp_avg of a": 1}
    assert kinds(first, second) == []
    second[1]["snapshots"]["first"]["optimizer"] = {}
    assert kinds(first, second) == [resumption.OPTIMIZER]


def test_a_rate_for_each_device_is_by_design_and_another_is_lost() -> None:
    first, second = ranks(4, SHUFFLED, 0), ranks(2, SHUFFLED, 2)
    second[0]["snapshots"]["first"]["rates"] = [0.05]
    judged = judge(first, second)
    assert not judged.losses and "scales it with the number of devices" in judged.designs[0]
    second[0]["snapshots"]["first"]["rates"] = [0.01]
    assert kinds(first, second) == [resumption.SCHEDULER]


def named(name: str, cases: tuple[Case, ...] = CLEAN) -> Case:
    return next(each for each in cases if each.name.startswith(name))


def resumed(dpsim: Dpsim, folder: Path, script: str, *more: str) -> tuple[int, str, str]:
    (folder / "train.py").write_text(script, encoding="utf-8")
    command = ("reproduce", "--torch-script", folder / "train.py", "--devices", "4", "--resume-on", "2", "--steps", "2")
    code, out, err = dpsim(*command, *more)
    assert "Traceback" not in err, err
    assert [path.name for path in folder.iterdir()] == ["train.py"]  # its checkpoint is discarded
    return code, out, err


def test_every_case_is_a_script_and_every_mistake_of_a_class() -> None:
    classes = {value for name, value in vars(resumption).items() if name.isupper() and isinstance(value, str)}
    assert {case.kind for case in MISTAKES} == classes - {resumption.PARAMETERS} and not any(
        each.kind for each in CLEAN
    )
    for case in (*MISTAKES, *CLEAN):
        compile(case.script, case.name, "exec")


@pytest.mark.torch
@pytest.mark.parametrize(
    "case", [named("the ordinary script"), named("fully_shard"), named("the weights alone")], ids=lambda case: case.name
)
def test_nothing_is_lost(dpsim: Dpsim, tmp_path: Path, case: Case) -> None:
    code, out, err = resumed(dpsim, tmp_path, case.script)
    assert (code, out) == (0, "The checkpoint after step 4 on 4 devices, resumed on 2 devices: nothing is lost.\n"), err


@pytest.mark.torch
def test_all_that_is_lost_is_named(dpsim: Dpsim, tmp_path: Path) -> None:
    script = named("as many batches", MISTAKES).script
    for each in MISTAKES:
        script = script.replace(each.parts.get("without", "\\0"), "pass")
    code, out, err = resumed(dpsim, tmp_path, script)
    assert code == 1, out + err
    for kind in ("OPTIMIZER", "SCHEDULER", "SCALER", "TWICE", "RANDOM"):
        assert f"(class: {getattr(resumption, kind)})" in out, out
    assert "StepLR is at 0 after resuming and was at 4" in out and "scale is 8.0 and was 32.0" in out
    assert "0 are never trained after resuming, and 16 a second time" in out


@pytest.mark.torch
def test_a_script_that_is_told_to_resume_gets_arguments_for_its_second_start(dpsim: Dpsim, tmp_path: Path) -> None:
    script = named("the ordinary").script.replace("if os.path.exists(", "if '--resume' in __import__('sys').argv and (")
    code, _, err = resumed(dpsim, tmp_path, script)
    assert code == 2 and "train.py has not resumed" in err and "after a second --" in err, err
    code, out, err = resumed(dpsim, tmp_path, script, "--", "--", "--resume")
    assert code == 0 and "nothing is lost" in out, out + err


@pytest.mark.torch
def test_a_script_that_writes_no_checkpoint_gets_one_message(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = resumed(dpsim, tmp_path, named("the ordinary").script.replace("steps == 4", "steps == 400"))
    assert code == 2 and "has written no checkpoint between two of its first 18 steps on 4 devices" in err, err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--devices", "1,2", "--resume-on", "2"), "--resume-on without one --devices"),
        (("--devices", "1", "--resume-on", "0"), "--resume-on is 0"),
        (("--devices", "1", "--resume-on", "2", "--bucket-cap", "0"), "--fusion-threshold with a script that resumes"),
    ],
)
def test_what_cannot_be_resumed_is_refused(dpsim: Dpsim, arguments: tuple[str, ...], given: str) -> None:
    code, _, err = dpsim("reproduce", "--torch-script", "train.py", *arguments)
    assert code == 2 and given in err, err
