"""The pages of docs/: every command in them runs, in the order of the page; every link leads somewhere.

The commands run in an empty folder that has only the repository's ``experiments``. A block ``sh`` is run by bash. A
block that begins with ``# NAME.py`` (or .toml) is written to that file first. Budgets are shortened to a second: what
they are spent on has tests of its own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim.cli import app
from dpsim.experiments import one_node_slurm
from dpsim.report.glossary import terms

ROOT = Path(__file__).parents[1]
Dpsim = Callable[..., tuple[int, str, str]]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BUDGET = re.compile(r"(--budget |^budget_s = )\d+(s?)", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.(?:py|toml|txt))\n")
README = (ROOT / "README.md").read_text(encoding="utf-8")
_ANSWERS = {
    "Why is it slow?": {
        "177 ms of 610 ms are exposed communication": "177 ms of a step of 610 ms (29%) go to communication",
        "gradients in 16 bits would save 155 ms": "gradients sent in 16 bits (fp16_compress_hook): 155 ms less",
    },
    "Which bucket size?": dict.fromkeys(["fastest at threshold 0 (no certain difference: 1 MiB, 16 MiB)"]),
    "How many hours, what cost?": {
        "take 53.8 (41.1 to 69.8) hours and cost 387": "take 53.8 (41.1 to 69.8) hours and cost 387",
    },
    "Would a faster network pay?": dict.fromkeys(["134 ms instead of 187 ms: 1.40 times as fast (1.00 to 1.96)"]),
}
"""Parts of the README's answers, and the words of the command's output, where they differ."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    for language, text in _BLOCK.findall(_BUDGET.sub(r"\g<1>1\2", page.read_text(encoding="utf-8"))):
        if name := _FILE.match(text):
            (tmp_path / name[1]).write_text(text)
        elif language == "sh" and " --array slurm" in text:
            continue  # it runs below, where Slurm is installed
        elif language == "sh":
            path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", text],
                cwd=tmp_path,
                env=os.environ | {"PATH": path, "COLUMNS": "120", "CI": "", "DPSIM_LEDGER": "on"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
            assert "Traceback" not in done.stderr, f"{text}\n{done.stderr}"
            assert page.stem != "ledger" or "2 predictions scored" in done.stdout, done.stdout
        else:
            assert language in ("text", "toml", "json", "yaml", ""), f"a block {language!r} that nobody runs:\n{text}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(one_node_slurm.unusable()), reason=one_node_slurm.unusable() or "Slurm is there")
def test_the_array_of_the_page_on_clusters_makes_a_report(tmp_path: Path) -> None:
    page = _BUDGET.sub(r"\g<1>1\2", (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8"))
    (text,) = (text for _, text in _BLOCK.findall(page) if " --array slurm" in text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    wait = 'while [ -n "$(squeue -h)" ]; do sleep 0.5; done; cat out/tasks/last.out'
    with one_node_slurm.one_node_slurm() as environment:
        done = subprocess.run(
            ["bash", "-e", "-c", f"{text.strip()} --budget 1s\n{wait}"],
            cwd=tmp_path,
            env=environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = next(text for _, text in _BLOCK.findall(page) if text.startswith("Submitted slurm job "))
    assert re.sub(r"\d+ and \d+", "12 and 13", done.stdout.splitlines()[0]) == said.strip()
    assert (tmp_path / "out" / "report.md").exists(), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_listed_commands_run_one_after_the_other(tmp_path: Path) -> None:
    """Those that make files and read them; sweeps, training and benchmarks have tests of their own."""
    blocks = [block for _, block in _BLOCK.findall((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))]
    text = next(block for block in blocks if "dpsim doctor" in block)
    commands = [line.partition("  #")[0] for line in text.splitlines()]
    chain = ("profile", "calibrate", "predict")
    chosen = [each for each in commands if each.split()[1] in chain]
    assert [command.split()[1] for command in chosen] == list(chain)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in chosen:
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_what_predict_prints(dpsim: Dpsim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer that a command gives from files or flags alone."""
    monkeypatch.chdir(ROOT)
    shown = re.findall(r"^\*\*(.*?)\*\* (.*)\n\n```sh\ndpsim ([^`]*)```", README, re.MULTILINE)
    assert len(shown) == 7
    for question, answer, arguments in shown:
        if parts := _ANSWERS.get(question):
            code, printed, err = dpsim(*shlex.split(arguments.replace("\\\n", " ")))
            assert code == 0, err
            assert all(part in answer and (said or part) in printed for part, said in parts.items()), printed


def test_the_readme_is_short() -> None:
    assert 600 <= len(README.split()) <= 800


def test_what_has_run_on_gpus_is_said_in_the_same_words_everywhere() -> None:
    sentence = "dpsim has run on one GPU, an H100, and not yet on several ([what was seen]("
    pages = (ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "gpu.md")
    assert [page for page in pages if sentence not in " ".join(page.read_text(encoding="utf-8").split())] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_between_pages_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []


def test_every_module_that_computes_a_formula_exists() -> None:
    modules = set(re.findall(r"`(dpsim\.[\w.]+)`", (ROOT / "docs" / "formulas.md").read_text(encoding="utf-8")))
    assert len(modules) > 10
    assert not [name for name in modules if importlib.util.find_spec(name) is None]


def test_a_formula_of_the_glossary_is_on_the_page_of_formulas() -> None:
    """Letter for letter but for spaces, so that there is none of which nobody knows what computes it."""
    page = "".join((ROOT / "docs" / "formulas.md").read_text(encoding="utf-8").split())
    missing = {term.name for term in terms() if term.formula and "".join(term.formula.split()) not in page}
    assert not missing


def test_the_documentation_does_not_grow() -> None:
    """Words of all pages; the limit only falls."""
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES) <= 34_850


_SKYPILOT = {
    "": "name workdir num_nodes resources envs secrets file_mounts setup run service volumes config pool job_recovery",
    "resources": "infra accelerators accelerator_args cpus memory instance_type use_spot disk_size disk_tier"
    " network_tier max_hourly_cost image_id ports labels autostop any_of ordered job_recovery",
}
"""The fields of a task, and of its resources, in the reference that SkyPilot publishes of its YAML files."""


def test_the_file_for_skypilot_has_fields_of_skypilot_and_a_command_of_dpsim() -> None:
    reader = pytest.importorskip("yaml")
    (text,) = (text for kind, text in _BLOCK.findall((ROOT / "docs" / "cluster.md").read_text()) if kind == "yaml")
    task = reader.safe_load(text)
    assert {*task} <= {*_SKYPILOT[""].split()} and {*task["resources"]} <= {*_SKYPILOT["resources"].split()}
    program, *words = shlex.split(task["run"])
    assert program == "dpsim" and not app.build().parse_known_args(words)[2]
    assert "num_nodes" not in task and "[mpich]" in task["setup"] and task["workdir"] == "."
