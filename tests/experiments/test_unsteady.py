"""The emulated disturbance: it refuses where it may not disturb, and hands on the command's exit code."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from dpsim.experiments import unsteady


def test_without_the_right_to_real_time_priority_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    monkeypatch.setattr(sys, "argv", ["unsteady", "true"])
    assert unsteady.main() == 2
    assert "ulimit -r 1" in capsys.readouterr().err


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(unsteady, "disturb", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["unsteady", "--", sys.executable, "-c", "raise SystemExit(3)"])
    assert unsteady.main() == 3
