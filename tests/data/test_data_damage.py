"""Whatever happens to the bytes of a data set's file: an error of dpsim's own, or a data set one can train on."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from data_files import pictures, write_cifar, write_idx
from file_edits import EDITS, Edit, edited
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.data import load_dataset
from dpsim.errors import DpsimError


def check(token: str) -> None:
    try:
        data = load_dataset(token)
    except DpsimError as error:
        assert error.given
        return
    x, labels = data.train_batch(np.arange(len(data.train_y)))
    test_x, test_labels = data.test_batch(0, len(data.test_y))
    assert x.dtype == test_x.dtype == np.float32 and labels.dtype == test_labels.dtype == np.int64
    assert x.shape == (len(labels), *data.input_shape) and test_x.shape == (len(test_labels), *data.input_shape)
    assert len(data.input_shape) == 3 and x.size and test_x.size
    assert np.isfinite(x).all() and np.isfinite(test_x).all()
    assert set(test_labels) <= set(labels) <= set(range(data.classes)) and len(set(labels)) > 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    actual = tmp_path_factory.mktemp("damage")
    write_cifar(actual / "cifar", (3, 1, 1, 2, 4), 2)
    write_idx(actual / "plain")
    write_idx(actual / "gz", suffix=".gz")
    x, y = pictures(30, (2, 2, 1), classes=3)
    (actual / "arrays").mkdir()
    for name, save in (("stored", np.savez), ("deflated", np.savez_compressed)):
        save(actual / f"arrays/{name}.npz", x=x.astype(np.float32), y=y)
    np.save(actual / "arrays/x.npy", x.astype(np.float32))
    np.save(actual / "arrays/y.npy", y)
    shutil.copytree(actual, actual / "whole")
    return actual


CASES = [
    ("cifar10:{}/cifar", "cifar/data_batch_1.bin", 1),
    ("cifar10:{}/cifar", "cifar/test_batch.bin", 1),
    ("mnist:{}/plain", "plain/train-images-idx3-ubyte", 16),
    ("mnist:{}/plain", "plain/train-labels-idx1-ubyte", 8),
    ("mnist:{}/gz", "gz/train-images-idx3-ubyte.gz", 20),
    ("mnist:{}/gz", "gz/t10k-labels-idx1-ubyte.gz", 20),
    ("npz:{}/arrays/stored.npz", "arrays/stored.npz", 200),
    ("npz:{}/arrays/deflated.npz", "arrays/deflated.npz", 200),
    ("npy:{0}/arrays/x.npy,{0}/arrays/y.npy", "arrays/x.npy", 128),
    ("npy:{0}/arrays/x.npy,{0}/arrays/y.npy", "arrays/y.npy", 128),
]


@given(edits=EDITS, case=st.sampled_from(CASES))
@settings(max_examples=400)
def test_damage_anywhere_gives_an_error_of_ours_or_a_data_set(
    edits: list[Edit], case: tuple[str, str, int], folder: Path
) -> None:
    token, name, head = case
    whole = (folder / "whole" / name).read_bytes()
    (folder / name).write_bytes(edited(whole, edits, head))
    try:
        check(token.format(folder))
    finally:
        (folder / name).write_bytes(whole)


@given(edits=EDITS)
@settings(max_examples=200)
def test_damage_in_the_directory_of_an_archive_gives_an_error_of_ours_or_a_data_set(
    edits: list[Edit], folder: Path
) -> None:
    whole = (folder / "whole/arrays/stored.npz").read_bytes()
    directory = whole.index(b"PK\1\2")
    path = folder / "arrays/directory.npz"
    path.write_bytes(whole[:directory] + edited(whole[directory:], edits, 50))
    check(f"npz:{path}")


@given(data=st.binary(max_size=200), kind=st.sampled_from(["npz", "npy"]))
@settings(max_examples=100)
def test_any_bytes_at_all_are_answered(data: bytes, kind: str, folder: Path) -> None:
    path = folder / "arrays/any"
    path.write_bytes(data)
    check(f"npz:{path}" if kind == "npz" else f"npy:{path},{folder}/arrays/y.npy")


@given(header=st.text(st.sampled_from("{}'():, descrfotnaushpTuFl<>|123456789iO-x"), max_size=60))
@settings(max_examples=100)
def test_any_header_of_an_array_is_answered(header: str, folder: Path) -> None:
    memory = io.BytesIO()
    np.save(memory, np.zeros((30, 2), np.float32))
    whole = memory.getvalue()
    begun = b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + header.encode()
    path = folder / "arrays/header.npy"
    path.write_bytes(whole[:10] + begun[:118].ljust(118) + whole[128:])
    check(f"npy:{path},{folder}/arrays/y.npy")
