"""Ranks on shaped hosts: where hosts cannot be made one message says why, and however a run ends nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_tree import command_of
from python_path import extended_path
from shaped_networks import devices, skip_without_shaped_hosts

from dpsim.errors import ConfigError, DpsimError
from dpsim.experiments.stress.running import holders
from dpsim.launch import jobs
from dpsim.launch.shaped import hosts, switch

SUPPORT = Path(__file__).parents[1] / "support"
PLAIN = "shaped:2x20mbit"
OnRanks = Callable[..., Any]


@pytest.fixture
def shaped() -> None:
    skip_without_shaped_hosts()


def _named_by_switch(words: str = "") -> list[psutil.Process]:
    """Return this process's child that holds hosts, or a child of that whose command line has some word."""
    found = [child for child in psutil.Process().children() if switch.__file__ in command_of(child)]
    return [each for child in found for each in child.children() if words in command_of(each)] if words else found


def test_each_rank_has_a_host_whose_link_has_the_rate_of_each_network_in_turn_and_nothing_is_left(
    shaped: None, on_ranks: OnRanks
) -> None:
    before = devices()
    slow, faster, beside = f"{PLAIN}+slow-host=50%", f"{PLAIN}+rate=30mbit", f"{PLAIN}+background=50%"
    tokens = [PLAIN, slow, PLAIN, faster, beside, PLAIN]
    seen = on_ranks("ranks_shaped:about", {"networks": tokens}, devices=2, networks=tokens)
    assert [name for name, _ in seen["hosts"]] == [switch.address(0), switch.address(1)]
    namespaces = {namespace for _, namespace in seen["hosts"]}
    assert len(namespaces | {os.readlink("/proc/self/ns/net")}) == 3
    assert seen["rates"] == [[20, 20], [20, 10], [20, 20], [30, 30], [20, 20], [20, 20]]
    assert seen["ceiling"] > 3 * 30e6 / 8
    assert devices() == before and holders(namespaces, time.time()) == []


def test_a_rank_of_a_shaped_host_that_is_killed_is_named(shaped: None, on_ranks: OnRanks) -> None:
    with pytest.raises(jobs.JobFailed, match="rank 1 of 3 was killed by SIGKILL") as caught:
        on_ranks("launch_tasks:fail", {"rank": 1, "how": "SIGKILL"}, devices=3, networks=["shaped:4x20mbit"])
    assert caught.value.rank == 1 and _named_by_switch() == []


@pytest.mark.parametrize(
    ("process", "message"),
    [
        ("", "the process that holds the hosts of the shaped network {} was killed by SIGKILL"),
        pytest.param("--send", "the process that sends the flow in the background has ended", marks=pytest.mark.slow),
    ],
)
def test_a_network_that_ends_before_the_ranks_ends_the_job_and_is_named(
    process: str, message: str, shaped: None, on_ranks: OnRanks
) -> None:
    network, killed = f"{PLAIN}+background=50%", list[psutil.Process]()

    def kill(_: str) -> None:
        killed.extend(_named_by_switch(process))
        killed[0].kill()

    argument = {"network": network, "seconds": 600}
    with pytest.raises(jobs.JobFailed) as caught:
        on_ranks("ranks_shaped:enter_and_wait", argument, devices=2, networks=[network], progress=kill)
    assert message.format(f"({killed[0].pid})") in caught.value.given
    assert _named_by_switch() == []


@pytest.mark.slow
def test_a_stopped_network_process_is_ended_when_the_job_is_done(
    shaped: None, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_END_S", 0.2)
    argument = {"network": PLAIN, "seconds": 0}
    name = on_ranks(
        "ranks_shaped:enter_and_wait",
        argument,
        devices=2,
        networks=[PLAIN],
        progress=lambda _: _named_by_switch()[0].suspend(),
    )
    assert name == switch.address(0) and _named_by_switch() == []


@pytest.mark.slow
def test_a_rate_near_what_unshaped_links_carry_is_refused_with_both(shaped: None, on_ranks: OnRanks) -> None:
    with pytest.raises(ConfigError, match="unshaped, a link of these hosts carries") as caught:
        on_ranks("ranks_shaped:about", {"networks": ["shaped:2x1tbit"]}, devices=2, networks=["shaped:2x1tbit"])
    assert "rates up to a third of that" in caught.value.allowed


@pytest.mark.parametrize(
    ("networks", "count", "message"),
    [
        (["shaped:2x20mbit"], 3, "3 devices on shaped:2x20mbit"),
        (["shaped:2x20mbit", "node"], 2, "in one run"),
        (["shaped:2x20mbit", "shaped:4x20mbit"], 2, "in one run"),
    ],
)
def test_ranks_that_networks_have_no_host_for_are_refused(
    networks: list[str], count: int, message: str, on_ranks: OnRanks
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks("ranks_shaped:about", devices=count, networks=networks)


def test_a_shaped_network_of_a_command_that_makes_no_hosts_is_refused_but_one_device_needs_none(
    on_ranks: OnRanks,
) -> None:
    argument = {"network": PLAIN, "seconds": 0}
    with pytest.raises(ConfigError, match="does not start its ranks on shaped hosts"):
        on_ranks("ranks_shaped:enter_and_wait", argument, devices=2)
    assert on_ranks("ranks_shaped:enter_and_wait", argument, devices=1, networks=[PLAIN])


def test_a_hostfile_even_of_this_machine_is_refused(
    tmp_path: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    monkeypatch.setenv("DPSIM_HOSTFILE", str(tmp_path / "hosts"))
    with pytest.raises(ConfigError, match="start dpsim without mpiexec, srun and hostfile"):
        on_ranks("ranks_shaped:about", devices=2, networks=[PLAIN])


def _stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_an_mpiexec_that_is_not_mpich_s_is_refused(
    tmp_path: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stub(tmp_path, "mpiexec", "echo 'mpiexec (Open MPI) 5.0.7'")
    monkeypatch.setattr(jobs, "mpiexec_path", lambda: str(tmp_path / "mpiexec"))
    with pytest.raises(ConfigError, match="which is not mpich's") as caught:
        on_ranks("ranks_shaped:about", devices=2, networks=[PLAIN])
    assert "Intel MPI" in caught.value.allowed


def test_missing_commands_are_named_with_what_to_install(
    tmp_path: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "_TOOL_FOLDERS", ())
    _stub(tmp_path, "ip", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the commands tc, nsenter") as caught:
        on_ranks("ranks_shaped:about", devices=2, networks=[PLAIN])
    assert "iproute2" in caught.value.remedy


def _real(command: str) -> str:
    path = subprocess.run(["sh", "-c", f"PATH=$PATH:/usr/sbin:/sbin; command -v {command}"], capture_output=True)
    return path.stdout.decode().strip()


@pytest.mark.parametrize(
    ("condition", "command", "script", "message"),
    [
        ("delay=1ms", "tc", 'case "$(tee {log})" in *netem*) echo no netem >&2; exit 1;; esac', "the kernel's netem"),
        ("loss=1%", "nft", "echo no nftables >&2; exit 1", "packets cannot be lost by nft: no nftables"),
        ("slow-host=50%", "ip", "echo not allowed >&2; exit 1", "2 shaped hosts cannot be made here: ip: not allowed"),
        ("slow-host=50%", "ip", "kill -9 $$", "ip: exit code -9"),
        ("slow-host=50%", "ip", "kill -9 $PPID", "was killed by SIGKILL"),
    ],
)
def test_what_this_kernel_cannot_do_is_refused_before_a_rank_starts(
    condition: str,
    command: str,
    script: str,
    message: str,
    shaped: None,
    tmp_path: Path,
    on_ranks: OnRanks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "log"
    _stub(tmp_path, command, script.format(log=log) + f'\nexec {_real(command)} "$@" < {log}')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(jobs.mpiexec, "run", lambda *_, **__: pytest.fail("ranks were started"))
    network = f"{PLAIN}+{condition}"
    with pytest.raises(DpsimError) as caught:
        on_ranks("ranks_shaped:about", devices=2, networks=[network])
    assert message in caught.value.given and "\n" not in caught.value.given and caught.value.remedy
    assert _named_by_switch() == []


ON_RANKS = (
    "import sys; from dpsim.launch import jobs; from dpsim.errors import DpsimError\n"
    "try: print(jobs.on_ranks('ranks_shaped:about', {{'networks': [{0!r}]}}, devices=2, networks=[{0!r}])['rates'])\n"
    "except DpsimError as error: sys.exit(f'dpsim: {{error}}')"
)


def _unshared(script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a user namespace; skips where there can be none. ``$0`` is a Python, ``$1`` its program."""
    if not _real("unshare") or subprocess.run(["unshare", "-U", *flags, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are forbidden here")
    environment = os.environ | {"PYTHONPATH": extended_path(SUPPORT.parents[1], SUPPORT)}
    return subprocess.run(
        ["unshare", "-U", *flags, "sh", "-c", script, sys.executable, ON_RANKS.format(PLAIN)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


@pytest.mark.slow
def test_a_user_without_rights_makes_hosts_in_a_user_namespace(shaped: None) -> None:
    done = _unshared('exec "$0" -c "$1"', "--map-user=1000", "--map-group=1000")
    assert (done.stdout, done.stderr, done.returncode) == ("[[20, 20]]\n".replace("20", "20.0"), "", 0)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (
            "echo 0 > /proc/sys/user/max_net_namespaces; exec",
            ("-r",),
            "network namespaces cannot be made: No space left",
        ),
        (
            "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --inh-caps=-all --ambient-caps=-all",
            ("--map-user=1000", "--map-group=1000", "--keep-caps"),
            "user and network namespaces cannot be made: No space left",
        ),
    ],
)
def test_forbidden_namespaces_are_named_with_what_else_to_use(
    script: str, flags: tuple[str, ...], message: str
) -> None:
    done = _unshared(f'{script} "$0" -c "$1"', *flags)
    assert done.returncode == 1 and message in done.stderr and "paced:LATENCY,BANDWIDTH" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("dpsim: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x" * 110, "a'b $x"])
def test_the_temporary_folder_may_have_a_path_that_is_long_or_that_a_shell_would_split(
    name: str, shaped: None, tmp_path: Path, on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    seen = on_ranks("ranks_shaped:about", {"networks": [PLAIN]}, devices=2, networks=[PLAIN])
    assert seen["rates"] == [[20, 20]] and list((tmp_path / name).iterdir()) == []
