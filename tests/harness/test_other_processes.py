"""Who uses the cores, from folders that look like /proc, by a clock that the tests move."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpsim.cli import flags, readers
from dpsim.errors import ConfigError
from dpsim.harness import doctor
from dpsim.study import other_processes
from dpsim.study.other_processes import Use, before_measuring, between, read, wait_until_quiet

OWN = os.getpid()
TICKS = 100


class Machine:
    """A folder like /proc of a machine with two cores; ``work`` lets processes compute while the clock goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now_s, self.counted = folder, 0.0, True
        self.busy = {0: 0, 1: 0}
        self.stolen = 0
        self.ticks: dict[int, int] = {}
        self.names = {OWN: ("dpsim", 1), OWN + 1: ("rank", OWN), OWN + 2: ("cc (1) plus", 1)}
        self.rates: dict[int, float] = {}
        self.write()

    def write(self) -> None:
        for number, (name, parent) in self.names.items():
            (self.folder / str(number)).mkdir(exist_ok=True)
            fields = ["R", str(parent), *["0"] * 9, str(self.ticks.get(number, 0)), *["0"] * 7, "77", *["0"] * 16, "1"]
            (self.folder / str(number) / "stat").write_text(f"{number} ({name}) {' '.join(fields)}")
        rows = [
            f"cpu{core} {ticks} 0 0 0 0 0 0 {self.stolen if core == 0 else 0} 0 0" for core, ticks in self.busy.items()
        ]
        rows = rows if self.counted else []
        (self.folder / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0", *rows, "procs_running 5"]))

    def work(self, seconds: float) -> None:
        self.now_s += seconds
        for number, rate in self.rates.items():
            self.ticks[number] = self.ticks.get(number, 0) + round(rate * seconds * TICKS)
        self.busy = {
            core: ticks + round(sum(self.rates.values()) / 2 * seconds * TICKS) for core, ticks in self.busy.items()
        }
        self.write()

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(other_processes, "TICKS_PER_S", TICKS)
    return Machine(tmp_path)


def used(machine: Machine, seconds: float = 0.5) -> Use:
    before = read(machine.folder, machine.clock)
    machine.work(seconds)
    after = read(machine.folder, machine.clock)
    assert before is not None and after is not None
    return between(before, after, OWN)


def test_a_quiet_machine_is_not_busy(machine: Machine) -> None:
    assert not used(machine).busy


def test_who_uses_the_cores_is_named_with_its_share(machine: Machine) -> None:
    machine.rates = {OWN + 2: 0.8}
    use = used(machine)
    assert use.busy and use.sentence == "other processes use 0.8 of 2 cores (cc (1) plus 0.8)"


def test_own_processes_do_not_count(machine: Machine) -> None:
    machine.rates = {OWN: 0.5, OWN + 1: 1.0}
    assert not used(machine).busy


def test_work_of_processes_that_cannot_be_seen_counts(machine: Machine) -> None:
    machine.names.pop(OWN + 2)
    machine.rates = {OWN + 2: 1.0}
    use = used(machine)
    assert use.used == pytest.approx(1.0) and "cannot be seen" in use.sentence


def test_what_other_virtual_machines_take_counts(machine: Machine) -> None:
    before = read(machine.folder, machine.clock)
    machine.stolen = 25
    machine.work(0.5)
    after = read(machine.folder, machine.clock)
    assert before is not None and after is not None
    assert "other virtual machines 0.5" in between(before, after, OWN).sentence


def test_without_counted_cores_the_processes_alone_tell(machine: Machine) -> None:
    machine.counted, machine.rates = False, {OWN + 2: 0.5}
    machine.write()
    assert used(machine).sentence == "other processes use 0.5 of 2 cores (cc (1) plus 0.5)"


def test_without_proc_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path / "none") is None
    monkeypatch.setattr(other_processes, "look", lambda: None)
    said: list[str] = []
    before_measuring(None, said.append)
    assert said == [] and doctor._cores().state == "ok"


def test_more_threads_than_free_cores_take_longer() -> None:
    assert Use(cores=2, used=0.0).times_as_long() == 1.0
    assert Use(cores=2, used=2.0, runnable=2.0).times_as_long() == 2.0
    assert Use(cores=64, used=3.0).times_as_long() == 1.0


def test_a_busy_machine_is_announced_and_doctor_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    use = Use(cores=2, used=2.0, shares={"python": 2.0}, runnable=2.0)
    monkeypatch.setattr(other_processes, "look", lambda: use)
    said: list[str] = []
    before_measuring(None, said.append)
    assert "python 2.0" in said[0] and "2.0 times as long" in said[0] and "--wait-until-quiet" in said[0]
    assert doctor._cores().state == "warn" and "python 2.0" in doctor._cores().found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("sweep --wait-until-quiet grid.toml", "sweep --wait-until-quiet=10m grid.toml"),
        ("profile --wait-until-quiet", "profile --wait-until-quiet=10m"),
        ("profile --wait-until-quiet 5min --json", "profile --wait-until-quiet 5min --json"),
        ("measure -- --wait-until-quiet", "measure -- --wait-until-quiet"),
    ],
)
def test_the_time_to_wait_may_be_left_out(words: str, expected: str) -> None:
    assert flags.with_wait(words.split()) == expected.split()


def test_the_time_to_wait_is_read() -> None:
    assert (readers.wait("10m"), readers.wait("90"), readers.wait("1h"), readers.wait(None)) == (
        600.0,
        90.0,
        3600.0,
        None,
    )
    with pytest.raises(ConfigError, match="--wait-until-quiet 5s"):
        readers.wait("5s")


def waits(machine: Machine, limit_s: float, rates: Iterator[float]) -> list[str]:
    said: list[str] = []

    def sleep(seconds: float) -> None:
        machine.rates = {OWN + 2: next(rates)}
        machine.work(seconds)

    wait_until_quiet(limit_s, said.append, proc=machine.folder, clock=machine.clock, sleep=sleep)
    return said


def test_it_waits_until_ten_quiet_seconds_and_says_who_computes(machine: Machine) -> None:
    said = waits(machine, 600.0, iter([1.0] * 65 + [0.0] * 60))
    assert 74 <= machine.now_s <= 76
    assert len(said) == 2 and all("cc (1) plus" in text for text in said)


def test_short_work_in_between_starts_the_wait_again(machine: Machine) -> None:
    waits(machine, 600.0, iter([0.0] * 8 + [2.0] + [0.0] * 60))
    assert machine.now_s > 15


def test_a_machine_that_stays_busy_ends_the_wait(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="other processes use") as error:
        waits(machine, 40.0, iter([1.0] * 60))
    assert machine.now_s == 40 and error.value.allowed and error.value.remedy
