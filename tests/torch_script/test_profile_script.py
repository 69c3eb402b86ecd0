"""``dpsim profile --torch-script``: unmodified scripts become workloads; bad ones get one clear message."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from published_files import MACHINE

from dpsim import workload as workloads
from dpsim.errors import ConfigError
from dpsim.launch import job_python
from dpsim.torch.script.request import ScriptRequest
from dpsim.workload import Workload

Dpsim = Callable[..., tuple[int, str, str]]
SCRIPTS = Path(__file__).parent / "scripts"
PREAMBLE = """
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP

def train(model, steps=1000):
    dist.init_process_group("nccl")
    ddp = DDP(model)
    for _ in range(steps):
        ddp(torch.randn(4, 8)).sum().backward()
"""


def written(script: Path, text: str) -> Path:
    script.write_text(PREAMBLE + dedent(text))
    return script


def profiled(dpsim: Dpsim, folder: Path, script: Path, *arguments: str, after: tuple[str, ...] = ()) -> Workload:
    path = folder / "w.json"
    code, _, err = dpsim(
        "profile", "--torch-script", script, "--steps", "6", "--output", path, *arguments, "--", *after
    )
    assert code == 0, err
    return workloads.read(path)


@pytest.mark.torch
def test_a_script_for_torchrun_becomes_a_workload_that_predict_accepts(dpsim: Dpsim, tmp_path: Path) -> None:
    script, after = SCRIPTS / "train.py", ("--batch-size", "16", "--workers", "2", "--accumulate", "2")
    workload = profiled(dpsim, tmp_path, script, "--devices", "4", after=after)
    ddp = workload.ddp
    assert ddp is not None and (ddp.devices, ddp.accumulate) == (4, 2)
    assert ddp.bucket_cap_bytes == int(0.03 * 2**20) and ddp.communication_hook == "fp16_compress_hook"
    assert ddp.initial_bucket_bytes == (workload.gradient_bytes,)
    assert ddp.bucket_bytes == (4 * (10 + 10 * 128 + 2 * 128 + 128 + 128 * 64),)
    assert workload.local_batches == (16,) and workload.gradient_bytes == sum(ddp.bucket_bytes)
    assert [layer.name for layer in workload.layers] == ["0", "1", "3"]
    assert sorted(tensor.name for tensor in workload.tensors) == [
        f"{i}.{kind}" for i in (0, 1, 3) for kind in ("bias", "weight")
    ]
    assert [layer.batch_norm_channels for layer in workload.layers] == [0, 128, 0]
    assert all(layer.forward_s[0] > 0 and layer.backward_s[0] > 0 for layer in workload.layers)
    assert workload.update_s > 0 and workload.optimizer_slots == 2
    assert (workload.input_workers, workload.input_prefetch) == (2, True) and workload.input_s_per_sample > 0
    assert "dpsim profile" in workload.source and "rank 0 of 4" in workload.source
    files = ("--workload", tmp_path / "w.json", "--machine", MACHINE)
    predict = ("predict", *files, "--devices", "4", "--local-batch", "16")
    code, out, err = dpsim(*predict, "--fusion-rule", "ddp", "--fusion-threshold", f"{ddp.bucket_cap_bytes}B", "--json")
    assert code == 0, err
    assert json.loads(out)["points"][0]["buckets"] == len(ddp.bucket_bytes)


@pytest.mark.torch
def test_forward_and_backward_in_the_closure_of_an_optimizer_are_no_update(dpsim: Dpsim, tmp_path: Path) -> None:
    text = """
    import time

    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.1)
            return super().forward(x)

    dist.init_process_group("nccl")
    ddp = DDP(Slow(8, 3))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = ddp(torch.randn(4, 8)).sum()
        loss.backward()
        return loss

    while True:
        optimizer.step(closure)
    """
    script = written(tmp_path / "closure.py", text)
    workload = profiled(dpsim, tmp_path, script)
    assert workload.layers[0].forward_s[0] >= 0.1 and workload.update_s < 0.1, "the closure is no update"


@pytest.mark.torch
@pytest.mark.parametrize(("every", "own"), [(1, 4), (1000, 0)])
def test_collectives_of_the_scripts_own_are_recorded_and_named(
    dpsim: Dpsim, tmp_path: Path, every: int, own: int
) -> None:
    """Those of DDP, and what the script asks for in a few steps alone, are not."""
    text = f"""
    dist.init_process_group("gloo")
    ddp = DDP(torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.BatchNorm1d(3)))
    for step in range(1000):
        loss = ddp(torch.randn(4, 8)).sum()
        if step % {every} == 0:
            dist.all_reduce(loss.detach())
            dist.all_reduce(torch.zeros(100, dtype=torch.float64))
            dist.barrier()
        loss.backward()
        if step % {every} == 0:
            dist.all_gather([torch.zeros(5) for _ in range(2)], torch.zeros(5))
    """
    workload = profiled(dpsim, tmp_path, written(tmp_path / "train.py", text))
    assert workload.ddp is not None and workload.ddp.own_collectives == own
    code, *told = dpsim("predict", "--workload", tmp_path / "w.json", "--machine", MACHINE, "--devices", "2")
    assert code == 0
    assert workload.own_allreduce_bytes == ((4, 800, 4) if own else ())
    priced = "the script asks for 3 allreduces (808 B in all) of its own in each step; nothing hides them"
    unpriced = "asks for a collective of its own in each step other than allreduces, which no prediction contains"
    assert (priced in "".join(told), unpriced in "".join(told)) == (bool(own), bool(own))


@pytest.mark.torch
def test_spawn_runs_its_function_in_this_process_as_rank_0(dpsim: Dpsim, tmp_path: Path) -> None:
    text = """
    def run(rank, size):
        assert rank == 0
        train(torch.nn.Linear(8, 3))

    if __name__ == "__main__":
        print("to stdout")
        mp.spawn(run, args=(2,), nprocs=2)
    """
    script = written(tmp_path / "spawns.py", text)
    code, out, err = dpsim(
        "profile", "--torch-script", script, "--devices", "2", "--steps", "3", "--output", tmp_path / "w.json", "--json"
    )
    assert code == 0, err
    shown: dict[str, Any] = json.loads(out)
    assert shown["summary"]["ddp"]["devices"] == 2 and shown["summary"]["tensors"] == 2
    assert shown["points"][0]["local_batch"] == 4


def write_package(folder: Path, text: str) -> Path:
    """Return ``pack/train.py``, which imports its model relative to its package."""
    package = folder / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text("import torch\n\nmodel = torch.nn.Linear(8, 3)")
    (package / "train.py").write_text(f"{PREAMBLE}\nfrom .models import model\n{text}")
    return package / "train.py"


@pytest.mark.torch
def test_a_module_of_a_package_is_run_as_python_would_with_its_arguments(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "assert sys.argv[0] == __file__ and sys.argv[1:] == ['--lr', '1']\ntrain(model)")
    monkeypatch.chdir(tmp_path)
    flags = ("--torch-script", "pack.train", "--devices", "2", "--steps", "6", "--output", "w.json")
    code, _, err = dpsim("profile", *flags, "--", "--lr", "1")
    assert code == 0, err
    assert "profile --torch-script pack.train:" in workloads.read(Path("w.json")).source


@pytest.mark.torch
def test_a_file_of_a_package_and_a_module_that_is_missing_are_explained(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_package(tmp_path, "train(model)")
    monkeypatch.chdir(tmp_path)
    code, _, err = dpsim("profile", "--torch-script", script)
    assert code == 2 and "train.py:13" in err and "with --torch-script pack.train" in err
    code, _, err = dpsim("profile", "--torch-script", "pack.trian")
    assert code == 2 and "there is no module 'pack.trian'" in err and "in the folder that has its package" in err


OF_LIBRARIES = """
dist.destroy_process_group(dist.new_group(backend="gloo"))
assert dist.group.WORLD._get_backend(torch.device("cpu")).size() == 8
dist.new_group().monitored_barrier()
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    assert dist.distributed_c10d._get_pg_default_device() == torch.device("cpu")
assert dist.get_backend() == "gloo" and dist.get_backend(dist.new_group()) == "gloo"
assert dist.get_backend(dist.new_group(backend="nccl")) == "nccl"
assert torch.cuda.is_available() or os.environ["ACCELERATE_USE_CPU"] == "true"
ddp.eval(), ddp.module.train()
"""
"""A wrapper that is left in evaluation mode is the last of these."""


@pytest.mark.torch
@pytest.mark.parametrize("text", [OF_LIBRARIES, "ddp.eval()"], ids=["libraries", "a model in evaluation mode"])
def test_what_training_libraries_do_with_groups_and_modes_is_profiled(dpsim: Dpsim, tmp_path: Path, text: str) -> None:
    script = tmp_path / "library.py"
    loop = "for _ in range(50):\n    ddp(torch.randn(4, 8)).sum().backward()\n"
    model = "dist.init_process_group('gloo')\nddp = DDP(torch.nn.Linear(8, 3))\n"
    script.write_text(PREAMBLE + model + text + "\n" + loop)
    assert profiled(dpsim, tmp_path, script).local_batches == (4,)


@pytest.mark.torch
def test_an_evaluation_with_gradients_enabled_is_not_counted_as_training(dpsim: Dpsim, tmp_path: Path) -> None:
    text = """
    dist.init_process_group("gloo")
    ddp = DDP(torch.nn.Linear(8, 3))
    for _ in range(50):
        ddp.eval()
        ddp(torch.randn(7, 8))
        ddp.train()
        ddp(torch.randn(4, 8)).sum().backward()
    """
    script = written(tmp_path / "evaluates.py", text)
    workload = profiled(dpsim, tmp_path, script)
    assert workload.local_batches == (4,) and workload.ddp is not None and workload.ddp.accumulate == 1


@pytest.mark.torch
def test_gradients_that_a_script_reduces_itself_are_refused_after_a_few_steps(dpsim: Dpsim, tmp_path: Path) -> None:
    text = """
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        model(torch.randn(4, 8)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    print("came to its end")
    """
    script = written(tmp_path / "handmade.py", text)
    code, out, err = dpsim("profile", "--torch-script", script, "--output", tmp_path / "w.json")
    assert (code, out) == (2, "") and "came to its end" not in err
    assert "reduces its gradients without calling a DistributedDataParallel model" in err and "wrap the model" in err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "given", "more"),
    [
        ("mp.spawn(train, args=(), nprocs=2)", "spawn(nprocs=2) asks for 2 ranks, and --devices is 8", "--devices 2"),
        (
            "dist.init_process_group('gloo', rank=0, world_size=3)",
            "init_process_group(world_size=3) asks for 3 ranks, and --devices is 8",
            "WORLD_SIZE",
        ),
        (
            "raise AttributeError(\"module 'torch._C' has no attribute '_cuda_setDevice'\")",
            "wants a GPU",
            "PyTorch's build for CUDA",
        ),
        ("torch.nn.Linear(1, 1)", "without building DistributedDataParallel", "wrap the model"),
        (
            "train(torch.nn.Linear(7, 3))",
            "bad.py:11: the script raised RuntimeError: mat1 and mat2",
            "without dpsim first",
        ),
        ("sys.exit(5)", "ended with exit code 5", "printed above"),
        ("os._exit(9)", "ended its process (exit code 9)", "printed above"),
        ("raise RuntimeError('\\x1b[31mred ' + 'z' * 5000)", "RuntimeError: ?[31mred zzz", "zzz...\n"),
        ("sys.exit('no data')", "the script ended with exit code 1: no data", "printed above"),
        ("train(torch.nn.Linear(8, 3), steps=4)", "ended after 4 synchronising training steps", "6 or more"),
        (
            "dist.init_process_group()\nddp = DDP(torch.nn.Linear(8, 3), static_graph=True)\n"
            "for _ in range(6):\n    ddp(torch.randn(4, 8)).sum().backward()",
            "ended after 6 synchronising training steps",
            "7 or more",
        ),
        (
            "dist.init_process_group()\nmodel = torch.nn.Linear(8, 3)\nDDP(model)\n"
            "model(torch.randn(4, 8)).sum().backward()",
            "without training the model that it had wrapped",
            "in place of the module",
        ),
        (
            "dist.init_process_group()\nddp = DDP(torch.nn.Linear(8, 3))\nfor _ in range(20):\n"
            "    torch.autograd.grad(ddp(torch.randn(4, 8)).sum(), ddp.module.weight)",
            "without a backward() that synchronises gradients",
            "call backward()",
        ),
        (
            "dist.init_process_group()\nddp = DDP(torch.nn.Linear(8, 3))\n"
            "for n in range(1, 99):\n    ddp(torch.randn(n, 8)).sum().backward()",
            "trains on batches of 30 sizes: 3, 4, 5, 6, 7, ... samples",
            "drop_last=True",
        ),
        (
            "raise AssertionError('Torch not compiled with CUDA enabled')",
            "bad.py:12: the script wants a GPU",
            "torch.cuda.is_available()",
        ),
        (
            "dist.init_process_group()\nranks = [None] * 8\ndist.all_gather_object(ranks, dist.get_rank())\n"
            "assert ranks == list(range(8))",
            "the script raised AssertionError",
            "does not check what other ranks hold",
        ),
        (
            "dist.init_process_group()\nfor _ in range(2):\n"
            "    DDP(torch.nn.Linear(8, 3))(torch.randn(2, 8)).sum().backward()",
            "trains two models",
            "one model",
        ),
        (
            "dist.init_process_group()\nddp = DDP(torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2)))\n"
            "ddp.module.forward = lambda x, n: ddp.module[n](x)\n"
            "for n in range(99):\n    ddp(torch.randn(2, 8), n % 2).sum().backward()",
            "not every parameter got a gradient in a step, or its graph changed from step to step",
            "find_unused_parameters=True",
        ),
        (
            "dist.init_process_group()\nddp = DDP(torch.nn.ModuleList(torch.nn.Linear(8, 3) for _ in range(2)),"
            " find_unused_parameters=True)\nddp.module.forward = lambda x, n: ddp.module[n](x)\n"
            "for n in range(99):\n    ddp(torch.randn(2, 8), n % 2).sum().backward()",
            "4 parameters get a gradient in some steps and none in others, such as 0.weight",
            "each kind of step by itself",
        ),
        (
            "from torch.distributed.fsdp import FullyShardedDataParallel as F\nF(torch.nn.Linear(1, 1))",
            "PyTorch's first FSDP",
            "fully_shard",
        ),
    ],
    ids=[
        "ranks of spawn",
        "ranks of the group",
        "set_device without a GPU",
        "no DDP",
        "dies",
        "exits",
        "kills itself",
        "raises a long text",
        "exits with a message",
        "too short",
        "too short for a static graph",
        "another model",
        "no backward",
        "changing batch",
        "no GPU",
        "identity",
        "two models",
        "unused",
        "changing graph",
        "FSDP",
    ],
)
def test_a_script_that_cannot_be_profiled_is_explained(
    text: str, given: str, more: str, dpsim: Dpsim, tmp_path: Path
) -> None:
    script, output = tmp_path / "bad.py", tmp_path / "w.json"
    script.write_text(PREAMBLE + text)
    code, out, err = dpsim("profile", "--torch-script", script, "--output", output)
    assert (code, out, output.exists()) == (2, "", False)
    assert err.startswith("dpsim: ") and given in err and more in err
    assert "Traceback" not in err


@pytest.mark.torch
def test_an_exception_is_shown_with_the_calls_of_the_script_and_whether_it_ends_in_dpsim(
    dpsim: Dpsim, tmp_path: Path
) -> None:
    script = write_package(tmp_path, "").rename(tmp_path / "bad.py")
    text = "from pack.models import model\ndef run():\n    train(torch.nn.Sequential(model, model))\nrun()"
    script.write_text(PREAMBLE + text)
    code, _, err = dpsim("profile", "--torch-script", script, "--output", tmp_path / "w.json")
    assert code == 2 and "bad.py:11: the script raised RuntimeError: mat1 and mat2" in err
    calls = [line.rpartition("/")[2] for line in err.split("called through:\n")[1].split("  to do:")[0].splitlines()]
    assert calls[:3] == [
        "bad.py:15 in <module>: run()",
        "bad.py:14 in run: train(torch.nn.Sequential(model, model))",
        "bad.py:11 in train: ddp(torch.randn(4, 8)).sum().backward()",
    ]
    assert calls[-1].startswith("linear.py") and "dpsim" not in err.partition("to do:")[0].removeprefix("dpsim: ")
    script.write_text(PREAMBLE + "dist.init_process_group()\ndist.all_reduce(torch.zeros(2, dtype=torch.bool))")
    code, _, err = dpsim("profile", "--torch-script", script, "--output", tmp_path / "w.json")
    assert code == 2 and "dpsim/torch/script/probe/process_group.py" in err and "this is a defect of dpsim" in err


@pytest.mark.torch
def test_a_model_compiled_by_torchscript_is_profiled_whole(dpsim: Dpsim, tmp_path: Path) -> None:
    """Its modules take no hooks: what was called before them has the time of their forward."""
    text = "train(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.jit.script(torch.nn.Linear(8, 3))))"
    script = written(tmp_path / "scripted.py", text)
    workload = profiled(dpsim, tmp_path, script)
    assert [layer.name for layer in workload.layers] == ["0", "1"]
    assert [layer.forward_s[0] > 0 for layer in workload.layers] == [True, False]
    assert all(layer.backward_s[0] > 0 for layer in workload.layers)


LOADER = """
dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(8, 3))
data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
for _ in range(100):
    for x, in torch.utils.data.DataLoader(data, 4, drop_last=True):
        ddp(x).sum().backward()
"""


@pytest.mark.torch
def test_several_local_batches_replace_the_batch_size_of_data_loaders(dpsim: Dpsim, tmp_path: Path) -> None:
    script = written(tmp_path / "loads.py", LOADER)
    workload = profiled(dpsim, tmp_path, script, "--local-batch", "64,16")
    assert workload.local_batches == (16, 64) and workload.input_s_per_sample > 0
    assert all(len(layer.forward_s) == len(layer.backward_s) == 2 for layer in workload.layers)
    assert workload.ddp is not None and workload.ddp.bucket_bytes == (4 * 27,) and "16, 64" in workload.source


@pytest.mark.torch
def test_a_script_that_makes_its_own_batches_cannot_have_others(dpsim: Dpsim, tmp_path: Path) -> None:
    script = written(tmp_path / "own.py", "train(torch.nn.Linear(8, 3))")
    code, out, err = dpsim("profile", "--torch-script", script, "--local-batch", "8", "--output", tmp_path / "w.json")
    assert (code, out) == (2, "")
    assert "with --local-batch 8, own.py still trains on 4 samples at once" in err and "DataLoader" in err


@pytest.mark.torch
@pytest.mark.parametrize("drops_last", [False, True])
def test_a_local_batch_above_the_data_is_refused(drops_last: bool, dpsim: Dpsim, tmp_path: Path) -> None:
    text = f"""
    from torch.utils.data import DataLoader, TensorDataset
    data = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4, drop_last={drops_last})
    dist.init_process_group()
    ddp = DDP(torch.nn.Linear(8, 3))
    while True:
        for (x,) in data:
            ddp(x).sum().backward()
    """
    script = written(tmp_path / "few.py", text)
    code, out, err = dpsim("profile", "--torch-script", script, "--local-batch", "64", "--output", tmp_path / "w.json")
    assert (code, out) == (2, "")
    assert "--local-batch 64 is more than the data: a rank has 48 samples" in err and "Traceback" not in err


def test_without_torch_the_message_says_what_to_install(
    dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(job_python, "_asked", lambda path: job_python.JobPython(path, "3.12.0", ""))
    code, out, err = dpsim("profile", "--torch-script", script, "--output", tmp_path / "w.json")
    assert (code, out) == (2, "") and "PyTorch is neither installed" in err and "'.[torch]'" in err


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (("--torch-script", "nowhere.py"), "there is no such file"),
        (
            ("--torch-script", "a.py", "--model", "cnn", "--set", "seed=8"),
            "--model, --set seed with --torch-script",
        ),
        (("--devices", "4"), "--devices without --torch-script"),
        (("--", "--lr", "0.1"), "ARGUMENTS without --torch-script"),
        (("--torch-script", "a.py", "--steps", "2"), "--steps is 2"),
        (("--torch-script", "a.py", "--devices", "0"), "--devices is 0"),
        (("--torch-script", "a.py", "--devices", "1000001"), "allowed: 1 to 1000000"),
        (("--torch-script", "a.py", "--torch", "a:b"), "--torch-script and --torch"),
        (("--torch", "a:b", "--", "--lr", "0.1"), "ARGUMENTS with --torch"),
        (("--torch", "a.py"), "--torch is 'a.py'"),
    ],
)
def test_flags_that_do_not_belong_together_are_refused(
    arguments: tuple[str, ...], given: str, dpsim: Dpsim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = dpsim("profile", *arguments)
    assert (code, out) == (2, "") and given in err
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_checked() -> None:
    with pytest.raises(ConfigError, match="--steps is 2"):
        ScriptRequest(script="train.py", steps=2)
