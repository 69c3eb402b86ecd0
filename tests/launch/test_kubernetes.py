"""``dpsim launch kubernetes`` prints what Kubeflow Trainer's published schema allows, and submits nothing."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.launch.job_script import BatchJob, job_script
from dpsim.launch.kubernetes import manifests, yaml

Dpsim = Callable[..., tuple[int, str, str]]
SCHEMA = tomllib.loads(Path(__file__).with_name("trainer_schema.toml").read_text(encoding="utf-8"))
TYPES: dict[str, type] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
AWKWARD = ["it's", '"$HOME"', "a: b", "# no comment", "- no item", "é", "a\nb", "{x}", "yes", "1", "", "back\\slash"]


def mistakes(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield what a value has that a schema does not allow, a field that it does not know included."""
    schema = SCHEMA[schema["ref"]] if "ref" in schema else schema
    if type(value) is not TYPES[schema["type"]]:
        yield f"{path} is a {type(value).__name__}"
        return
    if isinstance(value, dict):
        yield from (f"{path}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            of_name = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield from [f"{path}.{name} is unknown"] if of_name is None else mistakes(each, of_name, f"{path}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from mistakes(each, schema["items"], f"{path}[{number}]")
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path} is {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path} is {value!r}"
    if not schema.get("minimum", 0) <= (value if isinstance(value, int) else 1):
        yield f"{path} is {value!r}"
    if isinstance(value, (str, list)):
        least, most = schema.get("minLength", 0), schema.get("maxLength", schema.get("maxItems", len(value)))
        if not least <= len(value) <= most:
            yield f"{path} has {len(value)}"


def made(**changed: Any) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {"image": "r.example/dpsim:1", "nodes": 2, "ranks_per_node": 4, "cores": 8}
    fields |= {"seconds": 5400, "queue": "", "command": ["mpirun", *AWKWARD]}
    return manifests("mine", **fields | changed)


@pytest.mark.parametrize("queue", ["", "short"])
def test_the_runtime_and_the_job_are_as_the_published_schema_asks(queue: str) -> None:
    runtime, job = made(queue=queue)
    assert [*mistakes(runtime, SCHEMA["TrainingRuntime"])] == [*mistakes(job, SCHEMA["TrainJob"])] == []
    assert runtime["spec"]["mlPolicy"]["mpi"]["mpiImplementation"] == "OpenMPI"
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["metadata"].get("labels", {}) == ({"kueue.x-k8s.io/queue-name": "short"} if queue else {})
    launched = {each["name"]: each for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert launched.keys() == {"node", "launcher"} and launched["launcher"]["dependsOn"][0]["name"] == "node"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("0.spec.mlPolicy.mpi.mpiImplementation", "MPICH", "is 'MPICH'"),
        ("0.spec.mlPolicy.mpi.numProcPerNode", "4", "is a str"),
        ("0.spec.mlPolicy.mpi.slots", 4, "slots is unknown"),
        ("0.spec.template.spec.successPolicy", {}, "operator is missing"),
        ("1.metadata.name", "My job", "is 'My job'"),
        ("1.spec.activeDeadlineSeconds", 0, "is 0"),
        ("1.spec.trainer.command", ["x"] * 129, "has 129"),
    ],
)
def test_the_schema_refuses_what_is_wrong(place: str, value: object, said: str) -> None:
    documents = copy.deepcopy(made())
    number, *before, last = place.split(".")
    inner: Any = documents[int(number)]
    for name in before:
        inner = inner[name]
    inner[last] = value
    found = [*mistakes(documents[int(number)], SCHEMA[documents[int(number)]["kind"]])]
    assert len(found) == 1 and found[0].endswith(said)


def test_the_text_is_yaml_that_says_the_same() -> None:
    reader = pytest.importorskip("yaml")
    assert [*reader.safe_load_all(yaml(made(queue="short")))] == made(queue="short")


def test_a_dry_run_prints_the_command_with_its_ranks_and_time(dpsim: Dpsim) -> None:
    flags = "--devices 2x4 --cpus 2 --time 1-02:30:00 --name mine --queue short --image r.example/dpsim:1 --dry-run"
    code, out, err = dpsim("launch", "kubernetes", *flags.split(), "--", "train", "--model", "cnn")
    assert (code, err) == (0, "")
    said = " ".join(re.findall(r'^ +- "(.*)"$', out.partition("---\n")[2], re.MULTILINE))
    assert said.startswith("mpirun -n 8 -x OPENBLAS_NUM_THREADS=2 ")
    assert said.endswith("python3 -m dpsim train --model cnn --devices 2x4")
    for line in ("numNodes: 2", "numProcPerNode: 4", 'cpu: "8"', f"activeDeadlineSeconds: {26 * 3600 + 1800}"):
        assert f" {line}\n" in out
    code, out, _ = dpsim("launch", "kubernetes", "--image", "i", "--dry-run", "--", "of-the-image.py", "--lr", "0.1")
    assert code == 0 and '"mpi4py"\n      - "of-the-image.py"\n' in out


@pytest.mark.parametrize(
    ("time", "seconds"), [("90", 5400), ("90:30", 5430), ("01:00:01", 3601), ("2-3", 183600), ("1-00:01", 86460)]
)
def test_a_time_is_read_as_slurm_reads_it(time: str, seconds: int) -> None:
    job = BatchJob(scheduler="kubernetes", command=("train",), image="i", time=time)
    assert f"activeDeadlineSeconds: {seconds}\n" in job_script(job)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--image i -- train", "kubectl apply -f -"),
        ("--dry-run -- train", "allowed: an image that has dpsim, mpi4py and Open MPI"),
        ("--image i --name My -- train", "name is 'My'"),
        ("--image i --time 0 -- train", "time is '0' for kubernetes"),
        (f"--image i --time {'9' * 5000} -- train", "hours:minutes:seconds"),
        ("--image i --account a -- train", "account for kubernetes"),
        ("--image i --output o -- train", "output for kubernetes"),
        (f"--image i --dry-run -- train {'x ' * 200}", "allowed: 128 in a TrainJob"),
    ],
)
def test_what_kubernetes_cannot_have_is_a_mistake(words: str, said: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim("launch", "kubernetes", *words.split())
    assert (code, out) == (2, "") and said in err


def test_an_image_is_for_kubernetes_alone() -> None:
    with pytest.raises(ConfigError, match="image is 'i' for slurm"):
        BatchJob(scheduler="slurm", command=("train",), image="i")
