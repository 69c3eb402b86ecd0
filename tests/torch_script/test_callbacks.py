"""What ``dpsim explain`` learns of a job is in the job's own logger, by a callback for the framework that it uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import environments
import pytest

from dpsim.launch import watched_job
from dpsim.torch.script.probe import answer

LIGHTNING = """
class Callback:
    pass
"""
TRANSFORMERS = """
class TrainerCallback:
    pass

class Trainer:
    def log(self, logs):
        self.logged.append(logs)
        self.control.should_log = False  # as the real one, which has logged
"""
SCRIPT = """
import json, os, pathlib, sys, time, types
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from dpsim_callbacks import HuggingFaceCallback, LightningCallback
from torch.nn.parallel import DistributedDataParallel as DDP

ANSWER = pathlib.Path(os.environ["DPSIM_WATCH"].split(":", 1)[1], "answer.json")

class Trainer(transformers.Trainer):
    def log(self, logs):
        raise AssertionError("a log of the job's own, in which ranks may communicate")

class Logger:
    def __init__(self, logged, kind):
        self.logged = logged
        self.experiment = types.SimpleNamespace(**{"add_text": self.add_text} if kind == "TensorBoard" else {})

    def log_metrics(self, metrics, step):
        self.logged.append([step, metrics])

    def add_text(self, name, text, step):
        self.logged.append([step, {name: text}])

class Full(Logger):
    def log_metrics(self, metrics, step):
        raise OSError("no space is left")

def main(rank, folder, lightning):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    ddp = DDP(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    logged = {"CSV": [], "TensorBoard": [], "HuggingFace": []}
    loggers = [Full([], "CSV"), *(Logger(logged[kind], kind) for kind in ("CSV", "TensorBoard"))]
    own = types.SimpleNamespace(is_global_zero=rank == 0, loggers=loggers, global_step=0)
    trainer = Trainer()
    trainer.logged = logged["HuggingFace"]
    trainer.control = control = types.SimpleNamespace(should_log=True)
    state = types.SimpleNamespace(is_world_process_zero=rank == 0)
    hugging_face = HuggingFaceCallback(trainer)
    for step in range(20):
        began = pathlib.Path(folder, f"began-{step}")
        if rank == 0:
            began.touch()
        else:  # later than rank 0 in each step
            while not began.exists():
                time.sleep(0.01)
            time.sleep(0.2)
        optimizer.zero_grad()
        ddp(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        own.global_step = step + 1
        lightning.on_train_batch_end(own, ddp, None, None, step)
        hugging_face.on_step_end(None, state, control, model=ddp)
    while ANSWER.parent.exists() and not ANSWER.exists():
        time.sleep(0.01)
    for _ in range(2):
        lightning.on_train_end(own, ddp)
        hugging_face.on_epoch_end(None, state, control, model=ddp)
    assert control.should_log
    pathlib.Path(folder, f"logged-{rank}").write_text(json.dumps(logged))

if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1], LightningCallback()), nprocs=2)
"""


REAL = """
import os, pathlib, time
import torch
from torch import nn
from torch.utils.data import TensorDataset

ANSWER = pathlib.Path(os.environ["DPSIM_WATCH"].split(":", 1)[1], "answer.json")
DATA = [{"x": each, "labels": each[:1]} for each in torch.randn(192, 16)]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}

def wait(step):
    while step == 23 and ANSWER.parent.exists() and not ANSWER.exists():
        time.sleep(0.01)
"""
WITH_LIGHTNING = """
import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from dpsim_callbacks import LightningCallback

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, number):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Wait(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        wait(number)

quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=CSVLogger("."),
    callbacks=[Wait(), LightningCallback()], **quiet,
).fit(Module(), torch.utils.data.DataLoader(DATA, batch_size=4))
"""
WITH_TRANSFORMERS = """
import json
from transformers import Trainer, TrainerCallback, TrainingArguments
from dpsim_callbacks import HuggingFaceCallback

class Wait(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        wait(state.global_step - 1)

options = dict(save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100)
arguments = TrainingArguments(output_dir="out", num_train_epochs=1, per_device_train_batch_size=4, **options)
trainer = Trainer(model=Net(), args=arguments, train_dataset=DATA, callbacks=[Wait()])
trainer.add_callback(HuggingFaceCallback(trainer))
trainer.train()
if trainer.is_world_process_zero():
    pathlib.Path("logged.json").write_text(json.dumps(trainer.state.log_history))
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def with_trainers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with PyTorch, Lightning and Transformers, and nothing of dpsim."""
    folder = tmp_path_factory.mktemp("job") / "env"
    environments.with_torch(folder)
    if problem := environments.install(folder, "lightning", "transformers", "accelerate", needed=True):
        pytest.skip(f"Lightning and Transformers cannot be installed here: {problem[-200:]}")
    return folder / "bin"


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_lightning_and_transformers_log_what_was_learned(with_trainers: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": os.pathsep.join([str(with_trainers), os.environ["PATH"]])}
    environment["VIRTUAL_ENV"] = str(with_trainers.parent)
    for name, script in {"lightning": WITH_LIGHTNING, "transformers": WITH_TRANSFORMERS}.items():
        (tmp_path / f"with_{name}.py").write_text(REAL + script, encoding="utf-8")
        command = [sys.executable, "-m", "dpsim", "explain", "--steps", "10", "--", "torchrun", "--standalone"]
        done = subprocess.run(
            [*command, "--nproc-per-node", "2", f"with_{name}.py"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    (csv,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    assert {"dpsim/exposed_ms", "dpsim/waiting_ms"} <= set(
        csv.read_text(encoding="utf-8").partition("\n")[0].split(",")
    )
    logged = json.loads((tmp_path / "logged.json").read_text(encoding="utf-8"))
    (values,) = (each for each in logged if "dpsim/advice" in each)
    assert {"dpsim/exposed_ms", "dpsim/waiting_ms"} <= values.keys()


@pytest.mark.torch
@pytest.mark.timeout(600)
def test_what_was_learned_is_logged_once_by_rank_0(tmp_path: Path) -> None:
    """The libraries are stubs of what the callbacks use of them; the ranks get one of these from another process."""
    for name, text in {"train.py": SCRIPT, "lightning/pytorch.py": LIGHTNING, "transformers.py": TRANSFORMERS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "dpsim", "explain", "--steps", "10", "--", sys.executable, tmp_path / "train.py"]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(json.loads((tmp_path / "logged-1").read_text()).values())

    logged = json.loads((tmp_path / "logged-0").read_text())
    (values,) = logged["HuggingFace"]
    text = {"dpsim/advice": values["dpsim/advice"]}
    numbers = {name: value for name, value in values.items() if name not in text}
    assert {"dpsim/exposed_ms", "dpsim/waiting_ms", "dpsim/slow_rank"} <= numbers.keys()
    assert numbers["dpsim/waiting_ms"] > 0 and numbers["dpsim/slow_rank"] == 1
    assert text["dpsim/advice"].split(".")[0] in done.stderr
    ((step, metrics),) = logged["CSV"]
    assert metrics == numbers
    assert logged["TensorBoard"] == [[step, numbers], [step, text]]


def test_the_answer_is_looked_for_once_a_second_and_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moment_s = 0.0
    monkeypatch.setattr(answer, "now", lambda: moment_s)
    monkeypatch.setenv(watched_job.VARIABLE, watched_job.environment(tmp_path, 30)[watched_job.VARIABLE])
    for_steps, for_the_end = answer.Answer(), answer.Answer()
    assert for_steps.values() == for_the_end.values() == {}
    (tmp_path / watched_job.ANSWER).write_text('{"dpsim/slow_rank": 1}', encoding="utf-8")
    moment_s = 0.9
    assert for_steps.values() == {}
    assert for_the_end.values(now_or_never=True) == {"dpsim/slow_rank": 1}
    moment_s = 1.1
    assert for_steps.values() == {"dpsim/slow_rank": 1}
    assert for_steps.values(now_or_never=True) == for_the_end.values(now_or_never=True) == {}


@pytest.mark.parametrize("watched", [True, False])
def test_a_callback_is_imported_where_the_framework_is_and_dpsim_has_started_the_job(
    tmp_path: Path, watched: bool
) -> None:
    code = """
import sys
try:
    import dpsim_callbacks
    print(any(name.startswith("_dpsim") for name in sys.modules))
    from dpsim_callbacks import HuggingFaceCallback
    print(HuggingFaceCallback.__module__)
    from dpsim_callbacks import NobodysCallback
except ImportError as error:
    print(error)
"""
    (tmp_path / "transformers.py").write_text(TRANSFORMERS, encoding="utf-8")
    environment = watched_job.environment(tmp_path if watched else None, 30)
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(tmp_path)])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    if watched:
        assert done.stdout.splitlines()[:2] == ["False", "dpsim_callbacks"]
        assert "cannot import name 'NobodysCallback'" in done.stdout
    else:
        assert done.stdout == "No module named 'dpsim_callbacks'\n"
