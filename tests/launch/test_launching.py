"""``dpsim launch``: scripts on ranks, job scripts that mean what was asked, hostfiles, and who a rank is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch import child_process, hosts, jobs, rank_info
from dpsim.launch.hosts import Host, read_hostfile
from dpsim.launch.job_script import BatchJob, job_script

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPT = """
import json, sys
from dpsim.launch import rank_info
me = [rank_info.rank(), rank_info.size(), rank_info.local_rank(), rank_info.local_size()]
sys.stdout.write(json.dumps([me, sys.argv[1:], __name__]) + "\\n")  # in one piece: mpiexec mixes others
sys.stdout.flush()
print("a word aside", file=sys.stderr)
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if sys.argv[1:] == ["exit"] and me[0] == me[1] - 1:
    sys.exit(7)
if sys.argv[1:] == ["raise"] and me[0] == me[1] - 1:
    raise LookupError("the reason")
MPI.COMM_WORLD.Barrier()
"""
AWKWARD = ["a b", "it's", '"$HOME"', "*", "", "--flag=x y", "back\\slash", "é", "`id`", "a\nb"]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_script_runs_on_every_rank_as_python_would_run_it(devices: int, script: Path, dpsim: Dpsim) -> None:
    code, out, err = dpsim("launch", "local", "--devices", str(devices), "--", script, *AWKWARD)
    messages = sorted(json.loads(line) for line in out.splitlines())
    assert messages == [[[rank, devices, rank, devices], AWKWARD, "__main__"] for rank in range(devices)]
    assert (code, err.splitlines()) == (0, ["a word aside"] * devices)


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("raise", 1)])
def test_a_scripts_exit_code_and_traceback_are_the_commands(how: str, code: int, script: Path, dpsim: Dpsim) -> None:
    ended, _, err = dpsim("launch", "local", "--devices", "2", "--", script, how)
    assert ended == code
    assert "rank 1 of 2 failed" in err.splitlines()[-1]
    assert ("LookupError: the reason\n" in err and str(script) in err) == (how == "raise")


def test_a_script_finds_its_rank_under_a_launcher_too(script: Path) -> None:
    mpiexec = jobs.mpiexec_path()
    assert mpiexec is not None
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = child_process.run([mpiexec, "-n", "2", sys.executable, str(script)], env=environment, timeout_s=60)
    assert sorted(json.loads(line)[0] for line in done.stdout.splitlines()) == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert (rank_info.rank(), rank_info.size(), rank_info.local_rank(), rank_info.local_size()) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("local --", "there is no script to run"),
        ("local -- train", "dpsim commands start their ranks themselves"),
        ("local -- nowhere.py", "there is no such file"),
        ("local -- x.sh", "it does not end in .py"),
        ("local -- folder.py", "it is a folder"),
        ("local --stall-after -1 -- own.py", "stall-after is -1 s"),
        ("slurm -- train", "there is no sbatch on PATH"),
        ("slurm -- train", "--dry-run"),
        ("slurm --dry-run -- trian", "did you mean 'train'"),
        ("slurm --devices 8x1 -- sweep --torch-script own.py", "a sweep of a script on 8 nodes"),
        ("slurm --devices 8x1 -- sweep --torch-script own.py", "calibrate --from"),
    ],
)
def test_what_cannot_be_launched_is_a_mistake(
    command: str, words: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "own.py").touch()
    code, _, err = dpsim("launch", *command.split())
    assert (code, words in err) == (2, True), err


@pytest.fixture
def schedulers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for srun, sbatch, qsub and mpiexec: each notes its arguments; sbatch and qsub run the job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    record = f"import json, sys; json.dump(sys.argv[1:], open({str(tmp_path)!r} + '/' + {{name!r}}, 'w'))"
    for name in ("srun", "mpiexec", "sbatch", "qsub"):
        body = f'{sys.executable} -c "{record.format(name=name)}" "$@"\n'
        if name in ("sbatch", "qsub"):
            body += f'cat > {tmp_path}/job.sh; export PBS_O_WORKDIR="$PWD" PBS_NODEFILE="/the nodes"\n'
            body += f"bash {tmp_path}/job.sh && echo 4711\n"
        (folder / name).write_text(f"#!/bin/bash\n{body}", encoding="utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), os.environ["PATH"]]))
    monkeypatch.setattr(jobs, "mpiexec_path", lambda: str(folder / "mpiexec"))
    monkeypatch.setattr(jobs, "mpiexec_flavour", lambda _: "mpich")
    return tmp_path


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_a_submitted_job_runs_the_command_to_the_letter(
    scheduler: str, schedulers: Path, script: Path, dpsim: Dpsim
) -> None:
    assert dpsim("launch", scheduler, "--devices", "2x4", "--", script, *AWKWARD) == (0, "4711\n", "")
    starter = json.loads((schedulers / {"slurm": "srun", "pbs": "mpiexec"}[scheduler]).read_text())
    head = {
        "slurm": ["--mpi=pmi2", "--kill-on-bad-exit=1", "--cpus-per-task=1"],
        "pbs": ["-n", "8", "-f", "/the nodes"],
    }[scheduler]
    assert starter == [*head, sys.executable, "-m", "mpi4py", str(script), *AWKWARD]


def test_a_dry_run_prints_the_script_and_submits_nothing(schedulers: Path, dpsim: Dpsim) -> None:
    asked = "--devices 2x4 --cpus 2 --time 00:30:00 --name mine --account a --queue q --dry-run"
    flags = asked.split()
    code, out, err = dpsim("launch", "slurm", *flags, "--", "train", "--model", "cnn")
    assert (code, err) == (0, "")
    header = [line.removeprefix("#SBATCH --") for line in out.splitlines() if line.startswith("#SBATCH")]
    assert " ".join(header) == (
        "job-name=mine nodes=2 ntasks-per-node=4 cpus-per-task=2 time=00:30:00 output=mine-%j.out account=a partition=q"
    )
    assert out.endswith(f"{sys.executable} -m dpsim train --model cnn --devices 2x4\n")
    assert "export OMP_NUM_THREADS=2\n" in out
    assert not (schedulers / "sbatch").exists() and not (schedulers / "srun").exists()
    _, out, _ = dpsim("launch", "pbs", *flags, "--", "train", "--devices=3")
    assert "#PBS -l select=2:ncpus=8:mpiprocs=4\n" in out and "#PBS -l walltime=00:30:00\n" in out
    assert out.endswith("train --devices=3\n")
    words = ("--", "sweep", "--torch-script", "train.py")
    assert dpsim("launch", "slurm", "--devices", "8", "--dry-run", *words)[0] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("devices", "0x2"), ("devices", "2x"), ("cpus", 0), ("time", "soon"), ("name", "a b"), ("queue", "q\n#SBATCH -x")],
)
def test_a_job_that_no_scheduler_takes_is_a_mistake(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} is "):
        BatchJob(scheduler="slurm", command=("train",), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no command"):
        BatchJob(scheduler="pbs", command=())
    assert "nodes=1\n" in job_script(BatchJob(scheduler="slurm", command=("train",), devices="8"))


def test_a_hostfile_is_read_in_both_ways_of_writing_it(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=4\n\nnode2:3  # new\n[::1]:2\nnode3\n", encoding="utf-8")
    given = read_hostfile(path)
    assert given == (("node1", 4), ("node2", 3), ("[::1]", 2), ("node3", 1))
    assert hosts.mpiexec_arguments(given, "mpich") == ["-hosts", "node1:4,node2:3,[::1]:2,node3:1"]
    assert hosts.mpiexec_arguments(given[:1], "openmpi") == ["--host", "node1:4"]
    assert [hosts.any_remote(each) for each in (given, (Host("localhost"),), ())] == [True, False, False]
    with hosts.hostfile(path):
        assert len(hosts.selected(10)) == 4
        with pytest.raises(ConfigError, match=r"11 devices, but the hostfile .* has 10 slots"):
            hosts.selected(11)
    assert hosts.selected(1, {}) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("ok\nnode1 slots=many", "line 2 of .* is 'node1 slots=many'"),
        ("node1:0", "line 1 of"),
        ("a b", "line 1 of"),
    ],
)
def test_a_bad_hostfile_is_a_mistake_that_names_the_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        read_hostfile(path)
    with pytest.raises(ConfigError, match="cannot read the hostfile"):
        read_hostfile(tmp_path / "none")


def test_training_runs_on_the_hosts_of_a_hostfile(tmp_path: Path, dpsim: Dpsim) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\n127.0.0.1:1\n", encoding="utf-8")
    asked = ["--model", "mlp:6", "--dataset", "synthetic:4x4x1,classes=3,train=64,test=8", "--steps", "2"]
    code, out, err = dpsim("train", *asked, "--devices", "2", "--hostfile", path)
    assert (code, "2 devices" in out) == (0, True), err
    code, _, err = dpsim("train", *asked, "--devices", "3", "--hostfile", path)
    assert (code, "has 2 slots" in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "mistake", "words"),
    [
        ("data += parts[1:].sum(axis=0)", "pass", "bucket 0: the allreduce 'star' gives a wrong sum on rank"),
        (
            "t.receive(data, 0)",
            "t.receive(data[1:], 0)",
            "bucket 0: rank 1 got a message that is longer than the array",
        ),
    ],
)
def test_a_mistake_in_a_users_allreduce_ends_the_training(
    line: str, mistake: str, words: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/extend.md").read_text(encoding="utf-8")
    code = page.partition("# star.py\n")[2].partition("```")[0]
    assert line in code
    (tmp_path / "star.py").write_text(code.replace(line, mistake), encoding="utf-8")
    exit_code, _, err = dpsim("launch", "local", "--devices", "2", "--", str(tmp_path / "star.py"))
    assert (exit_code, words in err, "Traceback" in err) == (2, True, False), err


def test_a_script_says_who_waits_after_the_time_that_launch_names(dpsim: Dpsim, tmp_path: Path) -> None:
    """The last rank comes late to every step; a time that the script itself names counts first."""
    (tmp_path / "late.py").write_text(_LATE)
    command = ["launch", "local", "--devices", "2", "--stall-after", "0.2", "--", str(tmp_path / "late.py")]
    assert "dpsim: stalled for" in dpsim(*command)[2]
    code, _, err = dpsim(*command, "30")
    assert code == 0 and "stalled" not in err


_LATE = """
import sys, time
import dpsim

class Late(dpsim.Callback):
    def on_step_end(self, trainer, step):
        if dpsim.rank() == 1:
            time.sleep(0.8)

data = dpsim.load_dataset("synthetic:4x4x1,classes=3,train=64,test=8", 0)
named = {"stall_after_s": float(sys.argv[1])} if len(sys.argv) > 1 else {}
model = dpsim.build_model("mlp:4", data.input_shape, data.classes)
dpsim.fit(model, data, global_batch=16, steps=2, callbacks=[Late()], **named)
"""
