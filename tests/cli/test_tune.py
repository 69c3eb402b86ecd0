"""``dpsim tune``: its tables and its one sentence, its JSON, and what it says to a mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from published_files import MACHINE, WORKLOAD

Dpsim = Callable[..., tuple[int, str, str]]
FILES = ("--workload", str(WORKLOAD), "--machine", str(MACHINE))


def test_the_answer_is_the_last_line_and_nothing_is_pasted_where_no_gain_is_certain(dpsim: Dpsim) -> None:
    code, out, err = dpsim("tune", *FILES, "--devices", "2..16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[-1] == "No bucket cap is certainly better than DDP's default on 16 devices: leave it."
    assert "GoogleNet, K80, DDP on 16 devices" in out and "default: bucket cap 25 MiB, local batch 64" in out
    assert "All 16 devices pay" in out and "does not pay" not in out
    assert "a calibration of collectives on as many devices would decide" in out


def test_the_line_to_paste_is_that_of_the_framework(dpsim: Dpsim) -> None:
    code, out, err = dpsim("tune", *FILES, "--devices", "2", "--framework", "deepspeed")
    assert (code, err) == (0, "")
    *_, sentence, line = out.splitlines()
    assert sentence.startswith("Set DeepSpeed's bucket cap to 0 (a bucket a tensor): 2 devices train ")
    assert line == '"zero_optimization": {"reduce_bucket_size": 0}'


def test_json_has_every_option_and_the_answer(dpsim: Dpsim) -> None:
    code, out, err = dpsim("tune", *FILES, "--devices", "2,4", "--framework", "deepspeed", "--json")
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out)
    assert shown["command"] == "tune"
    points, summary = shown["points"], shown["summary"]
    assert {point["devices"] for point in points} == {2, 4}
    assert {point["field"] for point in points} == {
        *("fusion_threshold_bytes", "local_batch", "accumulate", "cap and batch")
    }
    for point in points:
        assert point["gain_low"] <= point["gain"] <= point["gain_high"]
        assert point["gain_certain"] == (point["gain_low"] > 1)
    assert [each["devices"] for each in summary["growth"]] == [2, 4]
    assert summary["devices"] == 4 and "4 devices train" in summary["answer"]
    assert summary["sweep"] == "", "files say neither what is trained nor that it is this machine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "2"), "neither a script nor both --workload and --machine"),
        (("--workload", str(WORKLOAD), "--devices", "2"), "neither a script nor both --workload and --machine"),
        ((*FILES, "--torch-script", "train.py", "--devices", "2"), "--workload and a script"),
        ((*FILES, "--devices", "1"), "on which nothing is communicated"),
        ((*FILES, "--devices", "2", "--framework", "hovorod"), "did you mean 'horovod'"),
        ((*FILES, "--devices", "2", "--wait-until-quiet"), "where nothing is measured"),
        ((*FILES, "--devices", "2", "--", "--width", "3"), "ARGUMENTS without a script"),
        ((*FILES, "--devices", "2", "--local-batch", "4", "--global-batch", "8"), "one of the two"),
        (("--torch-script", "train.py", "--devices", "2", "--framework", "horovod"), "where DDP decides it"),
        (("--torch-script", "train.py", "--devices", "2", "--set", "overlap=off"), "--set overlap with a script"),
        (("--torch-script", "missing.py", "--devices", "2"), "there is no such file"),
    ],
)
def test_a_mistake_is_one_message(dpsim: Dpsim, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = dpsim("tune", *arguments)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
