"""Whether PyTorch has a GPU for each rank, and the predictions of DDP by NCCL on them."""

from __future__ import annotations

import json

from dpsim.errors import ConfigError
from dpsim.harness.script.experiment import completed, most_devices
from dpsim.harness.sweep.experiment import predict_experiment
from dpsim.launch import child_process
from dpsim.launch.job_python import JobPython
from dpsim.machine import Machine
from dpsim.progress import Progress
from dpsim.records.sweep import Experiment, Predictions
from dpsim.study.environment import environment
from dpsim.study.inputs import Prepared
from dpsim.torch.script.profile_script import profile_script
from dpsim.torch.script.request import ScriptRequest
from dpsim.workload import Workload

_LOOK = (
    "import json, torch; from torch import distributed;"
    "print(json.dumps([torch.__version__, torch.cuda.device_count(), distributed.is_nccl_available()]))"
)
_LONGEST_S = 120.0


def check_gpus(ranks: int, by: JobPython) -> None:
    """Raises ``ConfigError`` unless the PyTorch of this Python has NCCL and a GPU for each rank."""
    done = child_process.run([by.path, "-c", _LOOK], timeout_s=_LONGEST_S, env=by.environment())
    version, gpus, nccl = json.loads(done.stdout) if done.returncode == 0 else ("", 0, False)
    if gpus >= ranks and nccl:
        return
    raise ConfigError(
        f"--algorithm nccl on {ranks} ranks, where PyTorch {version} sees {gpus} CUDA GPUs"
        f"{'' if nccl else ' and has no NCCL'}",
        allowed="a GPU for each rank, and PyTorch with NCCL",
        remedy="measure on such a machine, or with --algorithm gloo or mpi; --predict-only needs no GPU where "
        "--workload is given",
    )


def predicted_by_nccl(
    declared: Experiment, workload: Workload | None, machine: Machine | None, by: JobPython, progress: Progress
) -> Predictions:
    """Predict every setting from a profile on one GPU and from a machine with NCCL's allreduces.

    Ranks share no processor: they compute as fast as one alone. Raises ``ConfigError``.
    """
    if machine is None or not any(table.algorithm == "nccl" for table in machine.allreduce):
        given = "without --machine" if machine is None else f"with the machine {machine.name}, which has no times of it"
        raise ConfigError(
            f"--algorithm nccl {given}",
            allowed="a machine with NCCL's allreduces, as nccl-tests measures them",
            remedy="dpsim calibrate --from all_reduce_perf.txt --format nccl-tests --output nccl.json",
        )
    if workload is None:
        check_gpus(1, by)
        devices = most_devices(declared)
        progress(f"profiling {declared.script} as rank 0 of {devices} in one process")
        request = ScriptRequest(script=declared.script, arguments=declared.arguments, devices=devices)
        workload = profile_script(request, declared.values("local_batch"), by=by)
    experiment = completed(declared, workload)
    prepared = Prepared.for_all(experiment.settings, workload, machine)
    return predict_experiment(experiment, prepared, environment())
