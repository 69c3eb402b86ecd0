"""Signals to processes of commands, a few of each kind; ``make attacks`` sends hundreds. How attacks are counted."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsim.experiments.stress import kills, running
from dpsim.experiments.stress.kills import COMMANDS, Attack
from dpsim.experiments.stress.tally import CASES_VARIABLE, Outcome, Part, attack, by_hypothesis, shown


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("attack", "became"),
    [
        (Attack(command="launch local", kind="proxy", number=signal.SIGKILL), "ended"),
        (Attack(command="reproduce", kind="mpiexec", number=signal.SIGHUP), "ended"),
        (Attack(command="train --elastic", kind="rank", number=signal.SIGKILL), "went on by itself"),
        (Attack(command="train", kind="launcher", number=signal.SIGTERM), "ended and continued"),
        (Attack(command="validation --executor", kind="launcher", number=signal.SIGKILL, after_s=1.5), "ended"),
    ],
    ids=lambda value: value.name if isinstance(value, Attack) else "",
)
def test_a_signal_as_soon_as_there_is_the_process_leaves_nothing_and_is_told(
    attack: Attack, became: str, tmp_path: Path
) -> None:
    found = kills.outcome(attack, tmp_path, "0")
    assert (found.became, found.wrong) == (f"{attack.command}: {became}", "")


def test_every_kind_of_process_of_every_command_gets_signals() -> None:
    drawn = {(attack.command, attack.kind) for attack in (kills.drawn(number, 0) for number in range(2000))}
    assert drawn == {(name, kind) for name, command in COMMANDS.items() for kind in command.kinds}


def test_a_user_s_file_that_was_changed_or_removed_is_named_but_for_outputs(tmp_path: Path) -> None:
    running.add_notes(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "record.json").write_text("{}")
    before = running.contents(tmp_path)
    (tmp_path / "out" / "record.json").write_text("[]")
    (tmp_path / "new.txt").touch()
    assert running.changes(before, tmp_path, ["out"]) == ""
    (tmp_path / "notes.txt").unlink()
    assert running.changes(before, tmp_path) == (
        "removed of the user's files: notes.txt; changed of the user's files: out/record.json"
    )


@pytest.mark.timeout(300)
def test_cases_that_hypothesis_draws_are_counted_by_what_became_of_them_and_a_failure_is_shown(tmp_path: Path) -> None:
    tests = tmp_path / "test_numbers.py"
    tests.write_text(
        "import os\nfrom hypothesis import event, given, settings, strategies as st\n\n"
        f"@settings(max_examples=int(os.environ['{CASES_VARIABLE}']), database=None)\n"
        "@given(st.integers(0, 10**9))\ndef test_numbers(number):\n"
        "    event('even' if number % 2 == 0 else 'odd')\n    assert number != -1\n"
    )
    outcomes = list(by_hypothesis(str(tests))(0, 40, 3, tmp_path))
    assert len(outcomes) == 40 and {outcome.became for outcome in outcomes} == {"even", "odd"}
    tests.write_text(tests.read_text().replace("!= -1", "< 0"))
    assert "1 failed" in list(by_hypothesis(str(tests))(0, 40, 3, tmp_path))[-1].wrong


def test_an_interrupted_attack_goes_on_where_it_was(tmp_path: Path) -> None:
    file, begun = tmp_path / "out" / "part.jsonl", list[int]()

    def some(first: int, last: int, seed: int, folder: Path) -> Iterator[Outcome]:
        begun.append(first)
        for number in range(first, first + 3):
            yield Outcome(case=str(number), became="read", wrong="bad" if number == 1 else "")

    part = Part(some, 6)
    assert shown("part", attack(part, 6, 0, file)) == "part: 3 cases, 1 went wrong\n       3  read\n  1: bad"
    outcomes = attack(part, 6, 0, file)
    assert [outcome.case for outcome in outcomes] == [*"012345"]
    assert attack(part, 6, 0, file) == outcomes and begun == [0, 3]
