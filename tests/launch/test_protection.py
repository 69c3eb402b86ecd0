"""Twenty scripts that change the user's files: under each kind of protection none of these changes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsim.errors import ConfigError
from dpsim.launch import protection
from dpsim.launch.protection import protected, script_protection

PREAMBLE = """
import ctypes, logging, mmap, multiprocessing, os, shutil, sqlite3, subprocess, sys, time, zipfile
from pathlib import Path
libc = ctypes.CDLL(None)
"""
ATTACKS = {
    "open": "open('ck.pt', 'w').write('changed')",
    "append": "open('log.txt', 'a').write('changed')",
    "absolute path": "Path('ck.pt').resolve().write_text('changed')",
    "descriptor": "os.pwrite(os.open('ck.pt', os.O_RDWR), b'changed', 0)",
    "memory map": "mmap.mmap(os.open('ck.pt', os.O_RDWR), 0)[:3] = b'new'",
    "truncate": "os.truncate('ck.pt', 0)",
    "replace": "open('log.txt.new', 'w').close(); os.replace('log.txt.new', 'log.txt')",
    "rename": "os.rename('ck.pt', 'ck.old.pt')",
    "remove": "os.remove('ck.pt')",
    "remove a tree": "shutil.rmtree('runs')",
    "hard link": "os.link('ck.pt', 'same.pt'); open('same.pt', 'w').close()",
    "symbolic link": "open('link.pt', 'w').close()",
    "logger": "logging.FileHandler('log.txt', 'w').emit(logging.makeLogRecord({}))",
    "database": "sqlite3.connect('runs.db').execute('create table steps (loss)')",
    "archive": "zipfile.ZipFile('runs/a.zip', 'w').close()",
    "C library": "libc.unlink(b'ck.pt'); libc.rename(b'log.txt', b'runs/a.pt')",
    "shell": "subprocess.run('rm -r runs; echo changed > ck.pt', shell=True)",
    "daemon": "subprocess.Popen(['sh', '-c', 'echo > ck.pt'], start_new_session=True).wait()",
    "forked worker": "multiprocessing.get_context('fork').Process(target=os.remove, args=['ck.pt']).start()",
    "spawned worker": "multiprocessing.get_context('spawn').Process(target=os.remove, args=['ck.pt']).start()",
    "home": "Path.home().joinpath('best.pt').write_text('changed')",
    "folder of an argument": "open(sys.argv[1] + '/best.pt', 'w').close()",
    "folder beside": "open('../beside/best.pt', 'w').close()",
}
NAMESPACE, LANDLOCK = "namespace", "landlock"
USER_NAMESPACE = "namespace without privileges"

Contents = dict[str, bytes | None]


def contents(folder: Path) -> Contents:
    """The text of every file in a folder, and None for every folder in it."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the working directory, the home and others of a user, none of which counts as temporary."""
    user = tmp_path / "user"
    for name in ("work/runs", "home", "given", "beside"):
        (user / name).mkdir(parents=True)
        (user / name / "best.pt").write_text("best")
    for name in ("ck.pt", "log.txt", "runs/a.pt"):
        (user / "work" / name).write_text("original")
    (user / "work" / "link.pt").symlink_to("../beside/best.pt")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(protection, "_TEMPORARY", ("/dev", "/dev/shm", "/proc"))
    monkeypatch.setenv("HOME", str(user / "home"))
    monkeypatch.chdir(user / "work")
    return user


def without_privileges() -> None:
    """Let what this process executes next have no capabilities, even as root, but the one to map root as a user."""
    drop_from_bounding_set, set_file_capabilities, libc = 24, 31, ctypes.CDLL(None)
    for capability in {*range(64)} - {set_file_capabilities}:
        libc.prctl(drop_from_bounding_set, capability, 0, 0, 0)


def ran(text: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> subprocess.CompletedProcess[str]:
    """Run a script that gets the folder ``given`` as an argument; without protection for an empty ``kind``."""
    script = Path("train.py").absolute()
    command = [sys.executable, "-I", "-S", "-c", PREAMBLE + text, str(script.parent.parent / "given")]
    if kind:
        monkeypatch.setattr(protection, "MODES", (kind.split()[0],))
        try:
            command = protected(
                command, script_protection(str(script), command[-1:]), Path(tempfile.mkdtemp(dir=folder))
            )
        except ConfigError:
            pytest.skip(f"this system has no {kind}")
    drop = without_privileges if kind == USER_NAMESPACE else None
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=drop, check=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda text, kind="": ran(text, kind, tmp_path, monkeypatch)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_each_attack_changes_a_file_of_an_unprotected_script(text: str, files: Path, run: Run) -> None:
    before = contents(files)
    assert run(text).returncode == 0 and contents(files) != before


@pytest.mark.parametrize("kind", [NAMESPACE, USER_NAMESPACE, LANDLOCK])
def test_no_attack_changes_a_file_of_a_protected_script(kind: str, files: Path, run: Run) -> None:
    before = contents(files)
    for text in ATTACKS.values():
        said = run(text, kind).stderr
        assert contents(files) == before, (text, said)


@pytest.mark.parametrize("kind", [NAMESPACE, USER_NAMESPACE])
def test_a_protected_script_sees_what_it_writes(kind: str, files: Path, run: Run) -> None:
    text = "Path('ck.pt').write_text('mine'); shutil.rmtree('runs'); print(Path('ck.pt').read_text(), os.listdir())"
    done = run(text, kind)
    assert done.returncode == 0 and done.stdout.startswith("mine") and "runs" not in done.stdout, done.stderr
    assert set(os.listdir()) == {"ck.pt", "log.txt", "runs", "link.pt"}


@pytest.mark.parametrize("kind", [NAMESPACE, USER_NAMESPACE, LANDLOCK])
def test_temporary_folders_and_caches_are_written_and_the_rest_is_named(kind: str, files: Path, run: Run) -> None:
    cache = files / "home" / ".cache"
    cache.mkdir()
    done = run(f"open({str(cache / 'kept')!r}, 'w').close(); open({tempfile.gettempdir()!r} + '/kept', 'w')", kind)
    assert done.returncode == 0 and (cache / "kept").exists() and Path(tempfile.gettempdir(), "kept").exists()
    beside = str(files / "beside" / "best.pt")
    assert beside in run(f"open({beside!r}, 'a')", kind).stderr


def test_folders_that_arguments_name_are_found(files: Path) -> None:
    arguments = ("--out", "../given/new/run.pt", f"--best={files}/beside/best.pt", "--log=/dev/null", "--lr", "0.1", "")
    names = ("work", "home", "given", "beside")
    assert script_protection("train.py", arguments).discarded == tuple(sorted(str(files / name) for name in names))


def test_where_nothing_protects_the_script_the_user_has_to_agree(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protection, "MODES", ())
    with pytest.raises(ConfigError, match="--script-may-write"):
        protected(["true"], script_protection("train.py", ()), files)


@pytest.mark.parametrize("kind", [NAMESPACE, LANDLOCK])
def test_a_signal_of_the_terminal_does_not_interrupt_the_start_of_what_runs_protected(
    kind: str, files: Path, run: Run
) -> None:
    assert run("import signal; print(signal.getsignal(signal.SIGINT).name)", kind).stdout == "SIG_IGN\n"
