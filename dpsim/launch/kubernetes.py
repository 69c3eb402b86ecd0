"""A job as Kubeflow Trainer takes it: a TrainingRuntime, and the TrainJob that runs in it.

Trainer writes the hostfile and the keys for ssh. Its MPI policy takes Open MPI alone, so the image needs that, and the
user ``mpiuser`` with its ``sshd``, as images of ``mpioperator/openmpi`` have them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

API = "trainer.kubeflow.org/v1alpha1"
MOST_WORDS = 128
"""Of a TrainJob's command."""
_USER, _HOME, _SSH_PORT = 1000, "/home/mpiuser", 2222
_STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
_QUEUE = "kueue.x-k8s.io/queue-name"


def manifests(
    name: str,
    *,
    image: str,
    nodes: int,
    ranks_per_node: int,
    cores: int,
    seconds: int,
    queue: str,
    command: Sequence[str],
) -> list[dict[str, Any]]:
    """Return the runtime and the job: ``command`` is started once, by a launcher, on ``nodes`` with ``cores`` each.

    ``queue`` is one of Kueue; empty: none.
    """
    policy = {
        "mpiImplementation": "OpenMPI",
        "numProcPerNode": ranks_per_node,
        "sshAuthMountPath": f"{_HOME}/.ssh",
        "runLauncherAsNode": False,
    }
    daemon = {
        "command": ["/usr/sbin/sshd"],
        "args": ["-De", "-f", f"{_HOME}/.sshd_config"],
        "readinessProbe": {"tcpSocket": {"port": _SSH_PORT}, "initialDelaySeconds": 5},
        "resources": {"requests": {"cpu": str(cores)}},
    }
    ready = {"dependsOn": [{"name": "node", "status": "Ready"}]}
    template = {
        "network": {"publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
        "replicatedJobs": [
            {"name": "node", "template": {"spec": _pods(image, daemon)}},
            {"name": "launcher"} | ready | {"template": {"metadata": {"labels": _STEP}, "spec": _pods(image, {})}},
        ],
    }
    runtime = {
        "apiVersion": API,
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": {"mlPolicy": {"numNodes": nodes, "mpi": policy}, "template": {"spec": template}},
    }
    job = {
        "apiVersion": API,
        "kind": "TrainJob",
        "metadata": {"name": name} | ({"labels": {_QUEUE: queue}} if queue else {}),
        "spec": {
            "runtimeRef": {"apiGroup": API.partition("/")[0], "kind": "TrainingRuntime", "name": name},
            "activeDeadlineSeconds": seconds,
            "trainer": {"image": image, "numNodes": nodes, "numProcPerNode": ranks_per_node, "command": [*command]},
        },
    }
    return [runtime, job]


def _pods(image: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a Job whose pods have one container, which Trainer finds by the name ``node``."""
    user = {"runAsUser": _USER, "runAsGroup": _USER}
    containers = [{"name": "node", "image": image, "securityContext": user} | container]
    return {"template": {"spec": {"securityContext": {"fsGroup": _USER}, "containers": containers}}}


def yaml(documents: Sequence[dict[str, Any]]) -> str:
    """Return documents of YAML. Every text in them is quoted, as in JSON."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: dict[str, Any] | list[Any], indent: str = "") -> Iterator[str]:
    inner = indent + "  "
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, (dict, list)):
                yield f"{indent}{key}:"
                yield from _lines(each, inner)
            else:
                yield f"{indent}{key}: {json.dumps(each, ensure_ascii=False)}"
        return
    for each in value:
        if isinstance(each, dict):
            first, *others = _lines(each, inner)
            yield f"{indent}- {first.removeprefix(inner)}"
            yield from others
        else:
            yield f"{indent}- {json.dumps(each, ensure_ascii=False)}"
