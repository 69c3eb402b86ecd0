"""The package: what it imports, what it contains, and that it says who it is."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from importlib import import_module, resources
from pathlib import Path

import pytest

import dpsim
from dpsim.study.environment import environment

Python = Callable[..., subprocess.CompletedProcess[str]]
ROOT = Path(__file__).parents[1]
HEAVY = {"mpi4py", "cupy", "torch", "matplotlib", "pandas", "numba.cuda"}
STARTS = ".harness.sweep.sweep .harness.train.train .harness.doctor .harness.reproduce.measure"


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("", {"numpy", "msgspec", *HEAVY}),
        (".plan .workload .machine .records.sweep .model .study.environment .entry", HEAVY),
        (f"{STARTS} .imports .study.calibration .study.profile .study.inputs .study.task", {"mpi4py"}),
        (
            ".harness.sweep.on_ranks .study.runners.calibration .harness.train.on_ranks",
            {"scipy", "pandas", "matplotlib"},
        ),
        (".study.runners.script", {"torch"}),
    ],
    ids=["dpsim alone", "what predicts and reads", "what starts ranks", "ranks", "turns of a script"],
)
def test_an_import_loads_nothing_heavy(modules: str, heavy: set[str], python: Python) -> None:
    imports = "".join(f"import dpsim{module}\n" for module in modules.split() or [""])
    done = python("-c", f"import sys\n{imports}print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not heavy & {*done.stdout.split()}


def test_what_compiles_for_cuda_has_a_numpy_that_numba_cuda_works_with() -> None:
    requirements = pytest.importorskip("packaging.requirements")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]

    def allowed(extra: str, numpy: str) -> bool:
        parsed = [requirements.Requirement(each) for each in extras[extra]]
        return all(each.specifier.contains(numpy) for each in parsed if each.name == "numpy")

    for extra in ("cuda12", "cuda13", "ptx"):
        assert allowed(extra, "2.4.6") and not allowed(extra, "2.5.0"), extra
    assert allowed("dev", "2.5.0")


def test_make_test_puts_the_numpy_that_is_named_over_the_installed_one() -> None:
    command = ["make", "-n", "--no-print-directory", "-C", str(ROOT), "test", "VENV=nowhere"]
    for named in ("", "numpy==2.5.2"):
        done = subprocess.run([*command, f"NUMPY={named}"], capture_output=True, text=True, check=True, timeout=60)
        installs = [line for line in done.stdout.splitlines() if " -m pip " in line and "numpy==" in line]
        assert len(installs) == bool(named) and all(line.endswith(f'"{named}"') for line in installs)


def test_loading_a_result_loads_pandas_only_for_its_tables(python: Python) -> None:
    program = (
        "import sys, dpsim\n"
        "saved = dpsim.load('reports/devices')\n"
        "before = {'mpi4py', 'matplotlib', 'pandas'} & sys.modules.keys()\n"
        "saved.frame()\n"
        "print(repr(saved)[:5], before, 'pandas' in sys.modules)\n"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "sweep set() True\n"), done.stderr


def test_what_needs_torch_is_marked_so_that_make_test_torch_selects_it() -> None:
    unmarked = []
    for file in (ROOT / "tests").rglob("test_*.py"):
        text = file.read_text()
        if 'importorskip("torch"' in text and not re.search(r"^pytestmark = .*pytest\.mark\.torch", text, re.MULTILINE):
            unmarked.append(file.name)
    assert unmarked == [Path(__file__).name], "mark modules with pytestmark, and tests with @pytest.mark.torch"


def test_kernels_and_experiments_are_part_of_the_package() -> None:
    for name in ("kernels", "experiments"):
        module = import_module(f"dpsim.{name}")
        assert module.__file__ is not None
        assert Path(module.__file__).resolve().parent.name == name
    if (ROOT / ".git").exists():
        assert os.readlink(ROOT / "dpsim" / "kernels") == "../kernels"
        assert os.readlink(ROOT / "dpsim" / "experiments") == "../experiments"


def test_data_files_are_found_through_the_package() -> None:
    for name in ("digits.csv.gz", "digits.LICENSE"):
        assert (resources.files("dpsim.data") / name).is_file()
    assert (resources.files("dpsim.experiments.sweeps") / "fusion_threshold.toml").is_file()
    assert any(str(file).endswith(".j2") for file in (resources.files("dpsim.report") / "templates").iterdir())


def test_every_imported_package_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {text.split(">")[0].split("[")[0].lower() for text in project["dependencies"]}
    names = {"markupsafe": "MarkupSafe"}
    optional = {"cupy", "torch", "cuda", "lightning", "pytorch_lightning", "transformers"}
    actual: set[str] = set()
    for folder in ("dpsim", "kernels", "experiments"):
        for file in (ROOT / folder).rglob("*.py"):
            for line in file.read_text().splitlines():
                words = line.split()
                if words[:1] in (["import"], ["from"]) and len(words) > 1:
                    actual.add(words[1].split(".")[0].rstrip(","))
    from sys import stdlib_module_names

    foreign = {names.get(name, name) for name in actual if name.isidentifier()} - set(stdlib_module_names)
    assert {name.lower() for name in foreign} - optional - {"dpsim"} <= declared


def test_the_environment_is_described_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("MPIR_CVAR_X", "1")
    monkeypatch.setenv("OPENAI_KEY", "not recorded")
    before = dict(os.environ)
    here = environment()
    assert dict(os.environ) == before
    assert here.dpsim == dpsim.__version__
    assert here.variables["OPENBLAS_CORETYPE"] == "Haswell"
    assert here.variables["MPIR_CVAR_X"] == "1"
    assert "OPENAI_KEY" not in here.variables
    assert here.cores >= 1 and here.memory_bytes > 2**20
    assert here.blas != "unknown"
    assert environment() == here


def test_what_the_documentation_names_is_there_after_import_dpsim(python: Python) -> None:
    program = (
        "import pathlib, msgspec, dpsim\n"
        "w = dpsim.read_workload('experiments/machines/googlenet_k80.toml')\n"
        "m = dpsim.read_machine(pathlib.Path('experiments/machines/k80_10gbe.toml'))\n"
        "grid = dpsim.Grid.of(devices=2, fusion_threshold_bytes=1e6, local_batch=64)\n"
        "points, _ = dpsim.model.predict_points(w, m, grid)\n"
        "plan = dpsim.Plan(devices=2, global_batch=128, fusion_threshold_bytes=1e6, overlap=points[0]['overlap'])\n"
        "files = ['experiments/machines/googlenet_k80.toml', pathlib.Path('experiments/machines/k80_10gbe.toml')]\n"
        "plan = msgspec.structs.replace(plan, algorithm=points[0]['algorithm'])\n"
        "known = dpsim.model.for_prediction(w, m)\n"
        "assert dpsim.predict(*files, plan) == dpsim.predict(w, known, plan) != dpsim.predict(w, m, plan)\n"
        "print(dpsim.predict(w, m, plan).step_s == points[0]['predicted_step_s'], 'predict' in dir(dpsim))\n"
    )
    done = python("-c", program)
    assert (done.returncode, done.stdout) == (0, "True True\n"), done.stderr
