"""What experiments share: how a command ends."""

from __future__ import annotations

import pytest

from dpsim.errors import ConfigError
from dpsim.experiments import command


@pytest.mark.parametrize(("ending", "code"), [(None, 0), (3, 3), (ConfigError("3 ranks", allowed="2"), 2)])
def test_a_command_ends_with_its_code_or_an_explanation(
    ending: object, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int | None:
        if isinstance(ending, ConfigError):
            raise ending
        return ending if isinstance(ending, int) else None

    assert command.ended("name", run) == code
    assert capsys.readouterr().err.startswith("name: 3 ranks" if code == 2 else "")
