"""What experiments share: the line of a ratio, and how a command ends."""

from __future__ import annotations

import pytest

from dpsim.errors import ConfigError
from dpsim.experiments import command
from dpsim.experiments.cases import ratio_lines


def test_a_ratio_stands_beside_its_interval_and_its_limit() -> None:
    plain, slower = ratio_lines({"plain": [1e-3] * 3, "slower": [2e-3] * 3}, "plain", {"slower": 1.5})
    assert plain.split() == ["plain", "1.000", "ms", "1.000", "(1.000", "to", "1.000)"]
    assert slower.split() == ["slower", "2.000", "ms", "2.000", "(2.000", "to", "2.000)", "limit", "1.50"]


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
