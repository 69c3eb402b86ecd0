"""Fixtures that several rooms' tests use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App
from hypothesis import settings
from python_path import extended_path

from dpsim.launch import child_process, jobs

os.environ.setdefault("DPSIM_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "dpsim"))
"""What tests choose while others compute beside them must not become the user's choices."""

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""Commands that tests start inherit what is ignored: under nohup, and in the background of a shell script, this is."""

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the groups that gpu_check runs tests in hold: pytest-xdist writes them where pytest 9.2 no longer reads."""
    for item in items:
        grouped = getattr(item, "_nodeid", item.nodeid)
        if grouped != item.nodeid:
            item._id = type(item.id).parse(grouped)


INSTALLED = {name for name in ("torch", "cupy") if find_spec(name) is not None}
"""Read before any test puts a stand-in in a library's place."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that are marked ``torch`` or ``cupy`` run where that is installed."""
    if item.get_closest_marker("torch") and "torch" not in INSTALLED:
        pytest.skip("PyTorch is not installed: pip install -e '.[torch]'")
    if item.get_closest_marker("cupy") and "cupy" not in INSTALLED:
        pytest.skip("CuPy is not installed: make test-cupy fetches its wheel")


@pytest.fixture(scope="module", autouse=True)
def no_past_studies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What other tests measured says nothing of how wide the intervals of these predictions are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPSIM_STUDIES_DIR", str(tmp_path_factory.getbasetemp() / f"studies-{uuid.uuid4()}"))
        patch.setenv("DPSIM_LEDGER", "off")
        yield


@pytest.fixture
def dpsim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Runs a ``dpsim`` command in this process, as on a quiet machine: (exit code, stdout, stderr).

    ``application`` is that of another command, which ``python -m`` runs.
    """

    from dpsim.cli import app
    from dpsim.study import other_processes

    monkeypatch.setattr(other_processes, "look", lambda: None)

    def run(*arguments: str | Path, application: App | None = None) -> tuple[int, str, str]:
        capsys.readouterr()
        code = app.run([str(argument) for argument in arguments], application)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs this Python with the checkout on its path: ``python("-c", "...")``. What it starts ends with it."""

    def run(
        *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": extended_path(Path(__file__).parents[1])} | dict(env or {})
        return child_process.run([sys.executable, *arguments], env=environment, timeout_s=timeout_s)

    return run


@pytest.fixture(scope="session")
def on_ranks() -> Callable[..., Any]:
    """``jobs.on_ranks`` with the tests' own modules on the ranks' path; it ends before pytest ends the test.

    Four ranks that load PyTorch take 20 s of two cores, and minutes beside other processes.
    """

    def run(task: str, argument: dict[str, Any] | None = None, **options: Any) -> Any:
        env = {"PYTHONPATH": extended_path(Path(__file__).parent / "support")}
        return jobs.on_ranks(task, argument or {}, env=env, timeout_s=240, **options)

    return run


@pytest.fixture(scope="session")
def together(on_ranks: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Runs tasks (name, argument, devices) in one job, one after another, each on its first ranks: their results."""

    def run(*tasks: tuple[str, dict[str, Any], int]) -> list[Any]:
        argument = {"tasks": tasks}
        results: list[Any] = on_ranks("ranks_together:together", argument, devices=max(each[2] for each in tasks))
        return results

    return run
