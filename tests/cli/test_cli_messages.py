"""The command line's answers to mistakes: exit code 2, what was given, what is allowed, what to do; no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from published_files import EXPERIMENTS, MACHINE, PREDICT

from dpsim.cli import app
from dpsim.errors import ConfigError

Dpsim = Callable[..., tuple[int, str, str]]
Python = Callable[..., subprocess.CompletedProcess[str]]


def test_a_bare_threshold_is_warned_of(dpsim: Dpsim) -> None:
    code, out, err = dpsim(*PREDICT, "--devices", "2", "--local-batch", "64", "--fusion-threshold", "25,25MB")
    assert code == 0 and "warning: --fusion-threshold 25 means 25 bytes; write 25MB" in err
    assert "25 MB" in out and "23.84" not in out


def test_a_trace_of_a_benchmark_says_what_to_give_instead(dpsim: Dpsim, tmp_path: Path) -> None:
    code, _, err = dpsim(
        "report", EXPERIMENTS.parent / "reports" / "allreduce", "--trace", "--output", tmp_path / "t.json"
    )
    assert code == 2 and "holds a benchmark of the allreduce" in err and "run a sweep" in err


def test_predict_leads_with_what_to_do_and_says_what_it_assumes(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    thresholds = ("--fusion-threshold", "0,1MiB,inf")
    code, out, _ = dpsim(*PREDICT, "--devices", "4", "--local-batch", "64", *thresholds)
    assert (
        code == 0
        and "collectives of K80 nodes, 10 GbE" in out
        and " assumed " in out
        and "the intervals are 90% by assumption, from what" in " ".join(out.split())
    )
    assert "161.1 MiB +" in out and "activation memory, which the workload file does not state, comes on top" in out
    assert "fastest at threshold 0 (no certain difference: 1 MiB)" in " ".join(out.split())
    several = ("--fusion-rule", "ddp,mg-wfbp,horovod", "--algorithm", "mpi,ring", "--set", "cycle_s=5ms")
    code, out, _ = dpsim(*PREDICT, "--devices", "4", "--local-batch", "64", "--set", "overlap=off", *several)
    assert code == 0 and out.count("mg-wfbp") == 4 and out.count("horovod") == 4
    slow = tmp_path / "slow.toml"
    slow.write_text('schema = "dpsim.machine/1"\nname = "slow"\n[link]\nlatency_s = 9\nbandwidth_bytes_per_s = 1e3\n')
    code, out, _ = dpsim(*PREDICT[:3], "--machine", slow, "--devices", "2", "--global-batch", "64")
    assert code == 0 and "do not use them" in out
    options = ("--devices", "1,4", "--local-batch", "16,64", "--algorithm", "ring", "--output", tmp_path / "p.json")
    code, out, _ = dpsim(*PREDICT[:3], "--machine", f"{MACHINE},{slow}", *options)
    assert code == 0 and "slow: 4 devices, local batch 16 (64 in all), tarantella, ring: do not use them" in out
    assert "k80_10gbe, 4 devices: local batch 64 trains most samples per second" in out
    assert "4 devices, local batch 16 (64 in all), tarantella: slow takes" in out and "times as fast (" in out
    assert out.count("times as fast (") == 2 and "1 device, " not in out
    assert len(json.loads((tmp_path / "p.json").read_text())["summary"]["upgrades"]) == 2
    code, out, err = dpsim(*PREDICT[:3], "--machine", f"{MACHINE},nowhere.toml", "--devices", "4")
    assert (code, out) == (2, "") and "nowhere.toml" in err


def test_what_predict_writes_says_what_it_is(dpsim: Dpsim, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert dpsim(*PREDICT, "--devices", "2", "--local-batch", "64", "--output", path)[0] == 0
    written = json.loads(path.read_text())
    assert (written["schema"], written["command"]) == ("dpsim.output/1", "predict")
    assert {"workload", "machine", "machine_name", "cautions"} <= set(written["summary"])


@pytest.mark.parametrize(
    ("command", "given", "more"),
    [
        ("trian", "unknown command 'trian'", "did you mean 'train'?"),
        ("nonsense", "unknown command 'nonsense'", "allowed: bench, calibrate, doctor, explain"),
        ("sweep fusion-treshold", "unknown question 'fusion-treshold'", "did you mean 'fusion-threshold'?"),
        ("train --modle cnn", "unknown flag '--modle'", "did you mean '--model'?"),
        ("train --xyzzy=3", "unknown flag '--xyzzy'", "--global-batch"),
        ("train --devices two", "--devices is 'two'", "allowed: a whole number"),
        ("train --learning-rate fast", "--learning-rate is 'fast'", "allowed: a number"),
        ("train --devices", "--devices has no value", "see dpsim train --help"),
        ("train spare", "'spare' is more than this command takes", "see dpsim train --help"),
        ("predict --worklod w.json --devices 2", "unknown flag '--worklod'", "did you mean '--workload'"),
        (
            "sweep --torch-script a.py --rate=3",
            "unknown flag '--rate'",
            "arguments of the script follow --, as in -- --rate=3",
        ),
        ("profile --torch-script -m pack.train", "--torch-script has no value", "--torch-script package.train"),
        ("sweep --torch-script pack/train", "cannot run 'pack/train': it does not end in .py", "a Python script"),
        ("sweep --torch-script nowhere.py", "cannot run 'nowhere.py': there is no such file", "a Python script"),
        ("sweep --torch-script a.py --model cnn --set leaves=8", "--model, --set leaves with a script", "after --"),
        ("sweep devices --torch-script a.py", "the question devices of a script", "leave the question out"),
        ("sweep local-batch --workload w.json", "--workload without --torch-script", "name the script"),
        ("sweep devices --experiment a.toml", "--experiment is no flag of this version", "dpsim sweep FILE.toml"),
        ("report a --trace --source measured", "--source is no flag of this version", "--trace writes"),
        (
            "tune --devices 2 --measure",
            "--measure is no flag of this version",
            "that dpsim tune prints last",
        ),
        ("predict --rank strategy --measure", "--measure is no flag of this version", "dpsim sweep FILE.toml"),
        ("sweep devices -- 1", "'1' is more than this command takes", ""),
        ("predict", "--workload is missing", "see dpsim predict --help"),
        ("report", "FOLDER is missing", "see dpsim report --help"),
        ("report . --set overlap=off", "--set overlap with one folder", "or add --trace"),
        ("report . --trace --check", "--check with --trace", "leave it out"),
        ("report a b --format csv --trace", "--format, --trace with several folders", "leave it out"),
        ("predict --page a.html --set overlap=off", "--set overlap with --page", "a slider for each setting"),
        ("explain --json --devices 2 -- python a.py", "--devices, --json with a command and no script", "leave it out"),
        (
            "explain --json-line a.json --measured 1:1s,2:1s --parameters 9",
            "--json-line with --measured",
            "leave it out",
        ),
        ("explain --json-line a.json --set overlap=off -- python a.py", "--set overlap with a command", "leave it out"),
        ("explain --steps 2 -- python a.py", "--steps is 2", "5 or more"),
        ("explain nowhere.py", "there is no command 'nowhere.py'", "dpsim explain -- python"),
        ("report . --label one", "--label with one folder", "leave it out"),
        ("train --model vgg", "unknown model 'vgg'", "allowed: mlp, cnn"),
        ("train --dataset imagenet", "unknown data set 'imagenet'", "allowed: digits"),
        ("train --optimizer adam", "unknown optimizer 'adam'", "did you mean 'adamw'?"),
        ("train --optimizer adamw --set momentum=0.9", "momentum is 0.9, and adamw has none", "leave momentum out"),
        (
            "train --set trust_coefficient=0.1",
            "trust_coefficient is 0.1, and sgd has none",
            "leave trust_coefficient out",
        ),
        ("train --optimizer lars --set trust_coefficient=0", "trust_coefficient is 0.0", "a finite number > 0"),
        ("train --set nesterov=yes,momentum=0", "Nesterov's form with momentum 0", "leave nesterov out"),
        ("train --schedule cosin", "unknown schedule 'cosin'", "did you mean 'cosine'?"),
        ("train --schedule step:5,3", "milestones [5.0, 3.0]", "ascending"),
        ("train --schedule step:2 --set warmup_epochs=3", "the rate falls at epoch 2", "warm up for fewer epochs"),
        ("train --set warmup_epochs=-1", "warmup_epochs is -1.0", "0 or more epochs"),
        ("train --set reference_batch=0", "reference_batch is 0", "1 sample or more"),
        ("train --algorithm pigeon", "unknown algorithm 'pigeon'", "recursive-doubling"),
        ("train --algorithm rign", "unknown algorithm 'rign'", "did you mean 'ring'?"),
        ("train --set overlp=off", "unknown field in --set 'overlp'", "did you mean 'overlap'?"),
        ("train --set overlap", "--set is 'overlap'", "--set NAME=VALUE,NAME=VALUE"),
        ("train --set leaves=8,leaves=4", "--set is 'leaves=8,leaves=4'", "fields, each once"),
        ("train --set leaves=many", "--set leaves=many", "allowed: a whole number"),
        ("train --set nesterov=true", "--set nesterov=true", "allowed: yes, no"),
        ("train --fusion-rule ddp --set fusion_rule=one", "--fusion-rule ddp and --set fusion_rule=one", "one of the"),
        ("predict --page a.html --assume contention=2", "--assume with --page", "a slider for each setting"),
        ("train --set overlap=maybe", "unknown overlap 'maybe'", "poll"),
        (
            "sweep devices --algorithm own.py:tree",
            "unknown algorithm 'own.py:tree'",
            "as the entry point dpsim.algorithms",
        ),
        ("train --fusion-rule none", "unknown fusion rule 'none'", "tarantella"),
        ("train --network wifi", "network 'wifi' is not understood", "paced:50us,1gbit"),
        ("train --network paced:1day,1gbit", "duration '1day' is not understood", "write it like 50us"),
        ("train --fusion-threshold 64KiBi", "size '64KiBi' is not understood", "write it like 64KiB"),
        ("train --fusion-threshold -1", "-1", ""),
        ("train --fusion-rule one --fusion-threshold 1MiB", "takes no threshold", "leave --fusion-threshold out"),
        ("train --devices 9 --global-batch 8", "cannot feed 9 devices", "raise --global-batch"),
        ("sweep fusion-threshold --fusion-threshold 0,,inf", "--fusion-threshold is '0,,inf'", "single commas"),
        ("sweep fusion-threshold --devices 1,two", "--devices is 'two'", "a whole number of 1 or more"),
        ("sweep fusion-threshold --devices 4,2x2", "devices is [4, '2x2']", "different"),
        ("train --set wire_dtype=float16 --algorithm ring", "cannot send float16", "direct, hierarchical"),
        ("train --set compute_dtype=float16", "--set compute_dtype=float16", "float32, bfloat16"),
        ("train --set wire_dtype=half", "--set wire_dtype=half", "bfloat16"),
        ("train --devices 2x0", "--devices is '2x0'", "nodes x devices of a node like 2x4"),
        ("train --devices 4 --algorithm hierarchical", "on the flat layout 4", "--devices 2x2"),
        ("calibrate --devices 4,2x2 --algorithm hierarchical", "on the flat layout 4", "--devices 2x2"),
        ("sweep fusion-threshold --budget soon", "duration 'soon' is not understood", ""),
        ("calibrate --algorithm pigeon", "unknown algorithm 'pigeon'", "ring"),
        ("calibrate --list --budget 1s", "--budget with --list", "nothing is measured or imported"),
        ("calibrate --show 10gbe --merge a,b --from log.txt", "--merge, --from with --show", "leave --merge, --from"),
        ("calibrate --list --plot a.svg", "--plot", "--plot with --show or --compare"),
        ("calibrate --network wifi", "network 'wifi' is not understood", "paced:50us,1gbit"),
        ("profile --local-batch 0", "--local-batch is '0'", "whole numbers of 1 or more"),
        ("report nowhere", "there is no folder nowhere", "bench allreduce"),
        ("report . --format csv,xls", "unknown format 'xls'", "allowed: html, md, csv, parquet"),
    ],
)
def test_a_mistake_is_explained(command: str, given: str, more: str, dpsim: Dpsim, tmp_path: Path) -> None:
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        code, out, err = dpsim(*command.split())
    finally:
        os.chdir(before)
    assert code == 2
    assert out == ""
    assert err.startswith("dpsim: ")
    assert given in err
    assert more in err
    assert "Traceback" not in err


@pytest.mark.parametrize("where", ["/dev/null/x.json", ".", "/proc/x.json"])
def test_an_output_that_cannot_be_written_is_refused_before_the_work(where: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("train", "--steps", "1000000", "--output", where)
    assert (code, out) == (2, "")
    assert "choose another one with --output" in err


def test_the_output_folder_of_a_sweep_must_not_be_a_file(dpsim: Dpsim, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    code, _, err = dpsim("sweep", "fusion-threshold", "--output", file)
    assert code == 2
    assert "it is not a folder" in err


def test_a_damaged_file_is_a_mistake(dpsim: Dpsim, tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"schema": "dpsim.workload/1", "name": ')
    machine = MACHINE
    code, _, err = dpsim(
        "predict", "--workload", tmp_path / "w.json", "--machine", machine, "--devices", "2", "--global-batch", "64"
    )
    assert code == 2
    assert "not valid JSON" in err


def test_a_file_of_another_kind_is_a_mistake(dpsim: Dpsim) -> None:
    machine = MACHINE
    code, _, err = dpsim(
        "predict", "--workload", machine, "--machine", machine, "--devices", "2", "--global-batch", "64"
    )
    assert code == 2
    assert "is not a workload file" in err


def test_an_interrupt_ends_quietly_with_130(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpsim.harness.doctor.examine", interrupted)
    assert dpsim("doctor") == (130, "", "dpsim: interrupted\n")


def test_a_fault_of_ours_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("dpsim.harness.doctor.examine", broken)
    with pytest.raises(ZeroDivisionError):
        app.run(["doctor"])


def test_a_mistake_in_a_command_exits_with_2(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("x is 3", allowed="1 or 2", remedy="use 1")

    monkeypatch.setattr("dpsim.harness.doctor.examine", refused)
    assert dpsim("doctor") == (2, "", "dpsim: x is 3\n  allowed: 1 or 2\n  to do:   use 1\n")


def test_a_closed_pipe_ends_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "dpsim", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait(30)
    assert said == b""


def test_the_process_exits_with_the_commands_code(python: Python) -> None:
    done = python("-m", "dpsim", "trian")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert python("-m", "dpsim", "--version").returncode == 0
