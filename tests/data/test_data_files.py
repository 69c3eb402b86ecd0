"""Data sets from files: what is read, how it is normalised, and what is said about files that are not right."""

from __future__ import annotations

import gzip
import io
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_files import idx_bytes, pictures, write_cifar, write_idx

from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError, DpsimError, FileFormatError
from dpsim.nn import build_model

MNIST = ["train-images", "train-labels", "t10k-images", "t10k-labels"]


def everything(dataset: Dataset) -> tuple[Any, Any]:
    return dataset.train_batch(np.arange(len(dataset.train_y)))


@pytest.mark.parametrize("nested", [False, True])
def test_cifar_pictures_are_turned_from_planes_to_pixels_and_normalised(nested: bool, tmp_path: Path) -> None:
    x, y = write_cifar(tmp_path / "cifar-10-batches-bin" if nested else tmp_path)
    data = load_dataset(f"cifar10:{tmp_path}")
    seen, labels = everything(data)
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    np.testing.assert_allclose(seen, (x / 255 - mean) / std, atol=2e-6)
    assert labels.tolist() == y.tolist() and labels.dtype == np.int64
    assert data.input_shape == (32, 32, 3) and data.classes == 10 and len(data.test_y) == 7
    assert data.train_x.dtype == np.uint8 and seen.dtype == np.float32 and seen.flags.c_contiguous


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_in_every_spelling(mark: str, suffix: str, tmp_path: Path) -> None:
    x, y = write_idx(tmp_path, mark=mark, suffix=suffix)
    for kind, mean, std in (("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)):
        data = load_dataset(f"{kind}:{tmp_path}", dtype=np.float64)
        seen, labels = everything(data)
        np.testing.assert_allclose(seen[..., 0], (x / 255 - mean) / std, rtol=1e-12, atol=1e-12)
        assert seen.dtype == np.float64 and labels.tolist() == y.tolist()
        assert data.input_shape == (6, 5, 1) and data.classes == 10 and len(data.test_y) == 17


def test_a_sample_has_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    data = load_dataset(f"cifar10:{tmp_path}")
    whole, _ = everything(data)
    order = np.random.default_rng(0).permutation(50)
    for size in (0, 1, 3, 50):
        batch, labels = data.train_batch(order[:size])
        assert batch.shape == (size, 32, 32, 3) and batch.tobytes() == whole[order[:size]].tobytes()
        assert labels.tolist() == data.train_y[order[:size]].tolist()
    tests, _ = data.test_batch(0, 7)
    assert data.test_batch(3, 5)[0].tobytes() == tests[3:5].tobytes() and len(data.test_batch(7, 7)[0]) == 0


def test_digits_and_synthetic_samples_are_seen_as_they_are_stored() -> None:
    for token in ("digits", "synthetic:3x3x1,train=20,test=10"):
        data = load_dataset(token)
        some = np.array([5, 2, 9])
        assert data.train_batch(some)[0].tobytes() == data.train_x[some].tobytes()
        assert data.test_batch(2, 6)[0].tobytes() == data.test_x[2:6].tobytes()


@pytest.mark.parametrize("shape", [(4, 3, 2), (4, 3), (5,)])
@pytest.mark.parametrize("dtype", ["u1", "<f2", ">f4", "<f8"])
def test_npz_and_npy_are_split_class_by_class_and_brought_to_mean_0_and_deviation_1(
    shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    x, y = pictures(90, shape, classes=3)
    np.savez(tmp_path / "set.npz", x=x.astype(dtype), y=y.astype(np.int16), names=np.array(["a", "b"], object))
    np.save(tmp_path / "x.npy", np.asfortranarray(x.astype(dtype)))
    np.save(tmp_path / "y.npy", y.astype(np.uint64))
    data = load_dataset(f"npz:{tmp_path}/set.npz")
    seen, labels = everything(data)
    assert np.bincount(labels).tolist() == [24, 24, 24] and np.bincount(data.test_y).tolist() == [6, 6, 6]
    channels = {3: shape[-1], 2: 1, 1: 5}[len(shape)]
    assert seen.dtype == np.float32 and seen.shape[-1] == channels and len(data.input_shape) == 3
    flat = seen.reshape(-1, channels).astype(np.float64)
    assert np.allclose(flat.mean(axis=0), 0, atol=1e-5) and np.allclose(flat.std(axis=0), 1, atol=1e-5)
    pair = load_dataset(f"npy:{tmp_path}/x.npy,{tmp_path}/y.npy")
    assert everything(pair)[0].tobytes() == seen.tobytes()
    assert pair.test_batch(0, 18)[0].tobytes() == data.test_batch(0, 18)[0].tobytes()
    build_model("mlp:4", data.input_shape, data.classes)


def test_the_test_part_of_an_archive_is_normalised_as_its_training_part(tmp_path: Path) -> None:
    x, y = pictures(60, (2, 2, 2), classes=4)
    x[..., 1] = 9  # constant: becomes 0
    for kind in (np.uint8, np.float32):
        parts = {"x_train": x[:40].astype(kind), "y_train": y[:40], "x_test": x[40:].astype(kind), "y_test": y[40:]}
        np.savez_compressed(tmp_path / "set.npz", **parts)
        data = load_dataset(f"npz:{tmp_path}/set.npz", dtype=np.float64)
        mean, std = x[:40, ..., 0].mean(), x[:40, ..., 0].std()
        actual, labels = data.test_batch(0, 20)
        np.testing.assert_allclose(actual[..., 0], (x[40:, ..., 0] - mean) / std, rtol=1e-9, atol=1e-9)
        assert not actual[..., 1].any() and labels.tolist() == y[40:].tolist()
        assert data.train_y.tolist() == y[:40].tolist() and data.classes == 4


def test_large_offsets_lose_no_precision(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "set.npz", x=values + 1e9, y=np.arange(40) % 2)
    seen = everything(load_dataset(f"npz:{tmp_path}/set.npz"))[0]
    assert seen.std(axis=0) == pytest.approx(1, abs=1e-6)


def test_paths_may_be_relative_to_the_current_or_the_home_folder_and_hold_colons_and_commas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar(tmp_path / "a,b:c")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/a,b:c", "a,b:c", "~/a,b:c"):
        assert len(load_dataset(f"cifar10:{path}").train_y) == 50
    write_idx(tmp_path / "a,b:c")
    assert len(load_dataset("mnist:~/a,b:c").train_y) == 50


@pytest.mark.parametrize("token", ["imagenet", "cifar100:/data", "CIFAR10:/data"])
def test_an_unknown_data_set_is_answered_with_every_form(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_dataset(token)
    for form in ("digits", "synthetic:HxWxC", "cifar10:DIR", "mnist:DIR", "fashion-mnist:DIR", "npz:FILE", "npy:X.npy"):
        assert form in caught.value.allowed


@pytest.mark.parametrize(
    ("token", "text"),
    [
        ("cifar10", "allowed: cifar10:DIR"),
        ("mnist:", "allowed: mnist:DIR"),
        ("cifar10:nowhere", "there is no folder nowhere"),
        ("cifar10:nowhere", "https://www.cs.toronto.edu/~kriz/cifar.html"),
        ("mnist:nowhere", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
        ("fashion-mnist:nowhere", "https://github.com/zalandoresearch/fashion-mnist"),
        ("mnist:a\0b", "is no path"),
        ("mnist:~nobody-of-this-name/x", "without ~"),
        ("cifar10:" + "x" * 5000, "File name too long"),
        ("npz:nowhere.npz", "nowhere.npz does not exist"),
        ("npz:.", "is a folder"),
        ("npz:/dev/zero", "is no ordinary file"),
        ("npy:x.npy", "the paths without commas"),
        ("npy:x.npy,y.npy,z.npy", "the paths without commas"),
        ("npy:x.npy,", "is no path"),
        ("CIFAR10:/data", "did you mean 'cifar10'"),
    ],
)
def test_a_path_that_leads_nowhere_is_explained(
    token: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.zeros((4, 2)))
    with pytest.raises(DpsimError) as caught:
        load_dataset(token)
    assert text in str(caught.value)


Spoil = Callable[[Path], Any]


def cut(name: str, count: int) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-count])


def extend(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\1")


def put(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def overwrite(name: str, at: int, byte: int) -> Spoil:
    def spoil(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] = byte
        (folder / name).write_bytes(data)

    return spoil


def into_folder(name: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return spoil


def as_python_version(folder: Path) -> None:
    for number in range(1, 6):
        (folder / f"data_batch_{number}.bin").rename(folder / f"data_batch_{number}")


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / "data_batch_3.bin").unlink(), "data_batch_3.bin not found in"),
        (as_python_version, "which holds the Python version"),
        (cut("test_batch.bin", 1), "6 records and 3072 bytes more"),
        (extend("data_batch_5.bin"), "8 records and 1 bytes more"),
        (put("data_batch_1.bin", b""), "has 0 bytes"),
        (overwrite("data_batch_2.bin", 2 * 3073, 10), "label 10 at byte 6146 (record 2)"),
        (into_folder("test_batch.bin"), "Is a directory"),
    ],
)
def test_damaged_cifar_files_are_explained(spoil: Spoil, text: str, tmp_path: Path) -> None:
    write_cifar(tmp_path)
    spoil(tmp_path)
    with pytest.raises(FileFormatError) as caught:
        load_dataset(f"cifar10:{tmp_path}")
    assert text in caught.value.given and "cifar" in (caught.value.allowed + caught.value.remedy).lower()


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda folder: (folder / "train-labels-idx1-ubyte").unlink(), "train-labels-idx1-ubyte not found in"),
        (cut("train-images-idx3-ubyte", 1), "ends at byte 1515"),
        (extend("train-images-idx3-ubyte"), "goes on after byte 1516"),
        (cut("t10k-labels-idx1-ubyte", 18), "ends at byte 7, within its header"),
        (put("t10k-labels-idx1-ubyte", b""), "begins with 0x"),
        (put("t10k-labels-idx1-ubyte", idx_bytes(np.zeros(0))), "has no elements: 0"),
        (put("t10k-labels-idx1-ubyte", idx_bytes(np.zeros(16))), "17 pictures and"),
        (put("t10k-images-idx3-ubyte", idx_bytes(np.zeros((17, 5, 6)))), "pictures of 6x5, test pictures of 5x6"),
        (put("t10k-images-idx3-ubyte", idx_bytes(np.zeros(17))), "begins with 0x00000801"),
        (overwrite("train-images-idx3-ubyte", 2, 0x0D), "begins with 0x00000d03"),
        (overwrite("train-images-idx3-ubyte", 4, 0xFF), "ends at byte 1516"),
        (overwrite("train-labels-idx1-ubyte", 13, 10), "label 10 at byte 13"),
        (put("train-labels-idx1-ubyte", idx_bytes(np.full(50, 3))), "every training sample of data set"),
        (put("train-labels-idx1-ubyte", idx_bytes(np.arange(50) % 9)), "tests on class 9"),
        (into_folder("t10k-labels-idx1-ubyte"), "Is a directory"),
    ],
)
def test_damaged_idx_files_are_explained(spoil: Spoil, text: str, tmp_path: Path) -> None:
    write_idx(tmp_path)
    spoil(tmp_path)
    with pytest.raises(FileFormatError) as caught:
        load_dataset(f"mnist:{tmp_path}")
    assert text in caught.value.given and caught.value.allowed


@pytest.mark.parametrize("count", [1, 8, 20])
def test_a_gzip_file_that_is_cut_off_or_none_is_explained(count: int, tmp_path: Path) -> None:
    write_idx(tmp_path, suffix=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-count], whole[:-8] + bytes(8), b"no gzip", whole + b"more"):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=r"train-images-idx3-ubyte\.gz is damaged"):
            load_dataset(f"mnist:{tmp_path}")


def test_a_gzip_file_that_unpacks_to_more_than_its_header_says_is_not_unpacked(tmp_path: Path) -> None:
    write_idx(tmp_path, suffix=".gz")
    bomb = gzip.compress(idx_bytes(np.zeros(50)) + bytes(50_000_000), 1)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(bomb)
    tracemalloc.start()
    try:
        with pytest.raises(FileFormatError, match="goes on after byte 58"):
            load_dataset(f"mnist:{tmp_path}")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_explained(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").chmod(0)
    with pytest.raises(FileFormatError, match="Permission denied"):
        load_dataset(f"cifar10:{tmp_path}")


X, Y = pictures(30, (2, 2, 1), classes=3)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": X, "labels": Y}, "has the arrays labels, x"),
        ({"x": X.astype(object), "y": Y}, "holds Python objects"),
        ({"x": np.zeros(30, [("a", "f4")]), "y": Y}, "holds elements of type 'structure'"),
        ({"x": X.astype(np.complex64), "y": Y}, "holds elements of type '<c8'"),
        ({"x": X.astype(np.int64), "y": Y}, "has the type int64"),
        ({"x": X[:, 0, 0, 0], "y": Y}, "has the shape (30,)"),
        ({"x": X[:0], "y": Y[:0]}, "has the shape (0, 2, 2, 1)"),
        ({"x": X, "y": Y[:, None]}, "has the shape (30, 1)"),
        ({"x": X, "y": Y.astype(np.float32)}, "the type float32"),
        ({"x": X, "y": Y[:-1]}, "30 samples with 29 labels"),
        ({"x": X, "y": Y.astype(np.int8) - 1}, "is -1 at [0]"),
        ({"x": X, "y": Y.astype(np.uint64) + 2**63}, "is 9223372036854775808 at [0]"),
        ({"x": X, "y": Y + 1}, "class 0 has no training sample"),
        ({"x": X, "y": Y.astype(np.int64) * 10**9}, "class 1 has no training sample"),
        ({"x": X, "y": Y * 0}, "is of class 0"),
        ({"x": X[:5], "y": Y[:5]}, "5 samples to train on and 0 to test on"),
        ({"x": np.where(np.arange(30).reshape(-1, 1, 1, 1) == 4, np.nan, X), "y": Y}, "is nan at [4, 0, 0, 0]"),
        ({"x": np.where(np.equal(X, X.max()), -np.inf, X), "y": Y}, "is -inf at ["),
        ({"x": X * 1e300, "y": Y}, "too large to be brought to mean 0"),
        ({"x_train": X, "y_train": Y, "x_test": X[:, :1], "y_test": Y}, "test samples (1, 2, 1) of uint8"),
        ({"x_train": X, "y_train": Y, "x_test": X / 2, "y_test": Y}, "test samples (2, 2, 1) of float64"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y + 1}, "tests on class 3"),
        ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y[1:]}, "30 samples with 29 labels"),
    ],
)
def test_arrays_that_make_no_data_set_are_explained(arrays: dict[str, Any], text: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(FileFormatError) as caught:
        load_dataset(f"npz:{tmp_path}/set.npz")
    assert text in caught.value.given and caught.value.allowed


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda data: data[:-1], "has 59 bytes of elements"),
        (lambda data: data + b"\0", "has 61 bytes of elements"),
        (lambda data: data[:100], "has a damaged header"),
        (lambda data: b"", "is not in .npy format"),
        (lambda data: data[:6] + b"\7" + data[7:], "is not in .npy format"),
        (lambda data: data.replace(b"'<u2'", b"'|V2'").replace(b"'|u1'", b"'|O '"), "holds elements of type '|O '"),
        (lambda data: data.replace(b"(60,", b"(xx,"), "has a damaged header"),
        (
            lambda data: data.replace(b"(60,), }".ljust(40), b"(0, 99999999999999999999)}".ljust(40)),
            "has the shape (0, 9",
        ),
        (lambda data: data.replace(b"(60,), }".ljust(40), b"(60, 99999999999999999999)}".ljust(40)), "has 60 bytes of"),
        (
            lambda data: (
                data[:8]
                + b"\xff\xff"
                + b"'descr':'|u1','fortran_order':True,'shape':("
                + b"9" * 65491
                + b")"
                + bytes(60)
            ),
            "has a damaged header",
        ),
        (lambda data: data[:60] + b"(" + b"1," * 60 + b")".ljust(60), "has a damaged header"),
    ],
)
def test_damaged_npy_files_are_explained(spoil: Callable[[bytes], bytes], text: str, tmp_path: Path) -> None:
    memory = io.BytesIO()
    np.save(memory, np.arange(60, dtype=np.uint8) % 3)
    (tmp_path / "y.npy").write_bytes(spoil(memory.getvalue()))
    np.save(tmp_path / "x.npy", np.zeros((60, 2), np.float32))
    with pytest.raises(FileFormatError) as caught:
        load_dataset(f"npy:{tmp_path}/x.npy,{tmp_path}/y.npy")
    assert text in caught.value.given
