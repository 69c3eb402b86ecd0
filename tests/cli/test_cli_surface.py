"""The command line: every help page has examples and is shown at once; what its values mean."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest
from cyclopts import App

from dpsim.algorithms import ALGORITHMS
from dpsim.cli import app, readers
from dpsim.cli.commands import modules
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.records.train import TrainConfig
from dpsim.registry import load

Python = Callable[..., subprocess.CompletedProcess[str]]
Dpsim = Callable[..., tuple[int, str, str]]


def commands(application: App, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the application, each group of commands and each command, by its words; help.txt pins their flags."""
    yield " ".join(words)
    for word in application:
        if not word.startswith("-"):
            yield from commands(application[word], (*words, word))


@pytest.mark.parametrize("command", [*commands(app.build())])
def test_help_has_examples(command: str, dpsim: Dpsim) -> None:
    code, out, err = dpsim(*command.split(), "--help")
    assert (code, err) == (0, "")
    examples = out.split("Examples:\n")[1]
    assert f"dpsim {command}".strip() in examples
    assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("command", [name for name, module in modules().items() if hasattr(module, "SHOWN")])
def test_help_shows_the_flags_that_matter_and_names_the_page_of_all(command: str, dpsim: Dpsim) -> None:
    shown = modules()[command].SHOWN.split()
    pages = [dpsim(command, flag)[1] for flag in ("--help", "--help-all")]
    of_page, of_all = (re.findall(r"^│ [* ]{0,3}(--[\w-]+)", page, re.MULTILINE) for page in pages)
    of_page = [flag for flag in of_page if flag != "--bucket-cap"]  # another name of a flag, in a line of its own
    assert sorted(of_page) == sorted(shown) and len(of_page) <= 15 < len(of_all)
    assert {*of_page} < {*of_all} and f"dpsim {command} --help-all shows all flags" in pages[0]


@pytest.mark.parametrize(("words", "loaded"), [([], set()), (["sweep"], {"msgspec"}), (["train"], {"msgspec"})])
def test_help_loads_nothing_heavy(words: list[str], loaded: set[str], python: Python) -> None:
    """What declares the fields is loaded for the help of a command that has flags, and for no other."""
    program = (
        "import sys\n"
        "from dpsim.cli import app\n"
        f"assert app.run([*{words}, '--help']) == 0\n"
        "heavy = {'numpy', 'numba', 'pandas', 'matplotlib', 'scipy', 'mpi4py', 'msgspec', 'psutil'}\n"
        "print(*(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = python("-c", program)
    assert (done.returncode, set(done.stderr.split())) == (0, loaded)


def leaves(application: App) -> Iterator[App]:
    """Yield each command that runs something, also one that has others below it."""
    named = [word for word in application if not word.startswith("-")]
    for word in named:
        yield from leaves(application[word])
    if not named or application.default_command is not None:
        yield application


def test_there_are_few_flags() -> None:
    """The numbers only become smaller: a field that few change goes by --set."""
    rows = {
        leaf.name: sum(argument.names[0].startswith("--") for argument in leaf.assemble_argument_collection())
        for leaf in leaves(app.build())
    }
    assert sum(rows.values()) <= 220 and max(rows.values()) <= 30, rows


def test_completion_can_be_made() -> None:
    script = app.build().generate_completion(shell="bash")
    assert "fusion-threshold" in script


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node", ("node",)),
        ("node,paced:50us,1gbit", ("node", "paced:50us,1gbit")),
        ("paced:50us,1gbit,node,paced:1ms,200mbit", ("paced:50us,1gbit", "node", "paced:1ms,200mbit")),
        ("paced:50us", ("paced:50us",)),
    ],
)
def test_a_list_of_networks_is_split_where_a_network_ends(text: str, expected: tuple[str, ...]) -> None:
    assert readers.networks(text) == expected


def test_the_help_of_train_states_the_defaults_that_are_in_force(dpsim: Dpsim) -> None:
    config = TrainConfig.of()
    plan = config.plan
    text = " ".join(dpsim("train", "--help")[1].split())
    batch, seed = plan.global_batch, config.seed
    assert f"model {config.model} on {config.dataset}, {plan.devices} device, global batch {batch}, 20 epochs" in text
    assert f"seed {seed}, fusion rule {plan.fusion_rule} with a threshold of 32 KiB, overlap {plan.overlap}" in text
    assert plan.threshold_bytes == 32 * 1024 and config.total_steps(1) == 20


def test_help_names_every_registered_algorithm_and_rule(dpsim: Dpsim) -> None:
    text = " ".join(dpsim("predict", "--help")[1].replace("│", " ").split())
    assert all(name in text for name in (*ALGORITHMS, *FUSION_RULES))
    assert all(load(algorithm.steps) for algorithm in ALGORITHMS.values() if algorithm.steps is not None)
    assert all(load(rule.buckets) for rule in FUSION_RULES.values())


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("2min", 120.0), ("90s", 90.0), (None, None)])
def test_a_budget_is_read_with_and_without_its_unit(text: str | None, seconds: float | None) -> None:
    assert readers.budget(text) == seconds


def test_an_empty_list_is_a_mistake() -> None:
    with pytest.raises(ConfigError):
        readers.networks("")
    with pytest.raises(ConfigError):
        readers.listed("--devices", "", int)
