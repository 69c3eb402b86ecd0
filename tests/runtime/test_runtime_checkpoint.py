"""Checkpoint files: whole or not there, verified to the last bit, the last two kept, never two runs in one folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.optimizer import AdamW
from dpsim.plan import Plan
from dpsim.replica import Array
from dpsim.runtime.checkpoint import (
    Checkpoint,
    CheckpointFolder,
    Header,
    NotWritten,
    check_unused,
    checkpoints,
    encode,
    newest,
    read,
)

Python = Callable[..., subprocess.CompletedProcess[str]]


def checkpoint(step: int = 3, **tensors: Array) -> Checkpoint:
    plan = Plan(devices=2, global_batch=8, fusion_threshold_bytes=float("inf"), optimizer=AdamW())
    run = {"model": "mlp:4", "none": None}
    header = Header(step=step, epoch=0, batch=step, seed=1, training_samples=99, plan=plan, run=run)
    return Checkpoint(header=header, tensors=tensors or {"parameters/a": np.arange(6, dtype=np.float32)})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CheckpointFolder]:
    """An open folder of checkpoints."""
    opened = CheckpointFolder(tmp_path / "run", 0)
    yield opened
    opened.close()


def steps(folder: Path) -> list[int]:
    return [step for step, _ in checkpoints(folder)]


@settings(max_examples=40)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        npst.arrays(
            st.sampled_from(["float32", "float64", "float16", "int64", "uint8", "bool"]),
            npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        min_size=1,
        max_size=4,
    ),
    turned=st.booleans(),
)
def test_what_is_read_is_what_was_written(
    tensors: dict[str, Array], turned: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """To the bit, NaN and empty arrays too, and also from transposed arrays, which are not contiguous."""
    tensors = {name: value.T if turned else value for name, value in tensors.items()}
    path = tmp_path_factory.mktemp("c") / "checkpoint-3.safetensors"
    written = Checkpoint(header=checkpoint().header, tensors=tensors)
    path.write_bytes(encode(written))
    actual = read(path)
    assert actual.header == written.header
    assert actual.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (actual.tensors[name].dtype, actual.tensors[name].shape) == (value.dtype, value.shape)
        assert actual.tensors[name].tobytes() == value.tobytes()


def test_a_bit_that_flipped_anywhere_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3.safetensors"
    data = encode(checkpoint())
    random = np.random.default_rng(0)
    for place in range(len(data)):
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << int(random.integers(8))
        path.write_bytes(spoilt)
        with pytest.raises(FileFormatError):
            read(path)


def test_a_torn_file_is_noticed_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3.safetensors"
    data = encode(checkpoint())
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(FileFormatError, match="is damaged"):
            read(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(FileFormatError, match="is damaged"):
        read(path)


@settings(max_examples=100)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("c") / "checkpoint-3.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileFormatError, match="is damaged"):
        read(path)


def test_a_file_of_another_program_or_format_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "checkpoint-3.safetensors"
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(FileFormatError, match="SHA-256"):
        read(path)
    later = msgspec.structs.replace(checkpoint().header, schema="dpsim.checkpoint/9")
    path.write_bytes(encode(Checkpoint(header=later, tensors={"a": np.zeros(3)})))
    with pytest.raises(FileFormatError, match=r"dpsim\.checkpoint/9") as caught:
        read(path)
    assert "the version of dpsim that wrote it" in caught.value.remedy
    with pytest.raises(FileFormatError, match="cannot read the checkpoint"):
        read(tmp_path / "checkpoint-4.safetensors")


def test_the_newest_valid_checkpoint_is_found_and_damaged_newer_ones_are_named(folder: CheckpointFolder) -> None:
    for step in (9, 10):
        folder.write(checkpoint(step))
    (folder.folder / "checkpoint-11.safetensors").write_bytes(encode(checkpoint(11))[:-1])
    (folder.folder / "checkpoint-x.safetensors").touch()
    path, actual, damaged = newest(folder.folder)
    assert (path.name, actual.header.step) == ("checkpoint-10.safetensors", 10)
    assert [("checkpoint-11" in str(error)) for error in damaged] == [True]
    for _, bad in checkpoints(folder.folder):
        bad.write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"no checkpoint in .* can be used.*-11.*-10.*-9"):
        newest(folder.folder)


def test_a_folder_without_checkpoints_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="there is no checkpoint in"):
        newest(tmp_path)
    with pytest.raises(FileFormatError, match="there is no folder"):
        newest(tmp_path / "nowhere")
    check_unused(tmp_path / "nowhere")


def test_the_last_two_are_kept_by_step_and_not_by_name(folder: CheckpointFolder) -> None:
    for step in (8, 9, 10, 11):
        folder.write(checkpoint(step))
        assert len(steps(folder.folder)) <= 2
    assert steps(folder.folder) == [10, 11]
    assert sorted(path.name for path in folder.folder.iterdir()) == [
        "checkpoint-10.safetensors",
        "checkpoint-11.safetensors",
    ]


def test_going_on_sets_damaged_later_ones_aside_and_clears_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5.safetensors").write_bytes(encode(checkpoint(5)))
    (tmp_path / "checkpoint-7.safetensors").write_bytes(b"damaged")
    (tmp_path / ".checkpoint-9.safetensors.abc.partial").write_bytes(b"half")
    CheckpointFolder(tmp_path, 5).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoint-5.safetensors", "checkpoint-7.safetensors.damaged"]


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    first = CheckpointFolder(tmp_path, 0)
    first.write(checkpoint())
    with pytest.raises(ConfigError, match="another run is writing"):
        CheckpointFolder(tmp_path, 3)
    first.close()
    CheckpointFolder(tmp_path, 3).close()


def test_a_fresh_run_into_anothers_folder_is_refused(folder: CheckpointFolder) -> None:
    folder.write(checkpoint())
    with pytest.raises(ConfigError, match="has checkpoints already, the newest of step 3") as caught:
        check_unused(folder.folder)
    assert f"--resume {folder.folder}" in caught.value.remedy


def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="cannot write checkpoints to"):
            CheckpointFolder(place, 0)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_to_write_leaves_the_old_and_nothing_else(
    call: str, folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write(checkpoint(3))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(NotWritten) as caught:
        folder.write(checkpoint(4))
    text = str(caught.value)
    assert "the checkpoint of step 4 (" in text and "No space left on device" in text and "are free there" in text
    monkeypatch.undo()
    assert [path.name for path in folder.folder.iterdir()] == ["checkpoint-3.safetensors"]
    assert newest(folder.folder)[1].header.step == 3
    folder.write(checkpoint(5))


def test_a_full_disk_leaves_the_old_and_nothing_else(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small tmpfs")
    try:
        folder = CheckpointFolder(tmp_path, 0)
        folder.write(checkpoint(1))
        before = (tmp_path / "checkpoint-1.safetensors").read_bytes()
        with pytest.raises(NotWritten, match="No space left on device"):
            folder.write(checkpoint(2, big=np.zeros(100_000)))
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1.safetensors"]
        assert (tmp_path / "checkpoint-1.safetensors").read_bytes() == before
        folder.write(checkpoint(3))  # there is room for a small one
        folder.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_size_limit_leaves_the_old_and_nothing_else(tmp_path: Path, python: Python) -> None:
    program = (
        "import resource, sys, numpy as np\n"
        "from pathlib import Path\n"
        "sys.path.append(sys.argv[2])\n"
        "from killed_writer import content\n"
        "from dpsim.runtime.checkpoint import CheckpointFolder, NotWritten\n"
        "folder = CheckpointFolder(Path(sys.argv[1]), 0)\n"
        "folder.write(content(1))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n"
        "    folder.write(content(2))\n"
        "except NotWritten as error:\n"
        "    print(error)\n"
    )
    done = python("-c", program, str(tmp_path), str(Path(__file__).parents[1] / "support"))
    assert "cannot write the checkpoint of step 2" in done.stdout and "File too large" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1.safetensors"]
    assert read(tmp_path / "checkpoint-1.safetensors").header.step == 1


def test_bytes_are_written_durably_before_they_get_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the file, then rename, then fsync of the folder."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def kind(handle: int) -> str:
        return "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"

    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(f"sync {kind(handle)}"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    codec.write_bytes(tmp_path / "x", b"12")
    assert calls == ["sync file", "rename", "sync folder"]
    assert (tmp_path / "x").read_bytes() == b"12"
