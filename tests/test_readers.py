"""Readers of files and texts: a damaged one is read, or refused in words. There is no traceback; no file changes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import attacked, check_read_or_refused, damaged
from hypothesis import given
from hypothesis import strategies as st
from readers import READERS, TEXTS, Reader

some_examples = attacked(few=10, tests=len(READERS) + len(TEXTS))


@pytest.fixture(scope="module")
def reader_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reader]:
    """Sets up the reader of a name, with whole files of its own."""
    return functools.cache(lambda name: READERS[name](tmp_path_factory.mktemp("reader")))


def state(path: Path) -> tuple[int, ...]:
    """Return what differs if a file was written, replaced or (then it is empty) removed."""
    if not path.exists():
        return ()
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@pytest.mark.parametrize("name", TEXTS)
@some_examples
@given(data=st.data())
def test_a_damaged_text_is_read_or_refused_in_words(name: str, data: st.DataObject) -> None:
    read, texts = TEXTS[name]
    text = data.draw(damaged(data.draw(st.sampled_from(texts)).encode())).decode("utf-8", "surrogateescape")
    check_read_or_refused(lambda: read(text))


@pytest.mark.parametrize("name", READERS)
@some_examples
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_in_words_and_no_file_changes(
    name: str, data: st.DataObject, reader_of: Callable[[str], Reader]
) -> None:
    reader = reader_of(name)
    path = data.draw(st.sampled_from(reader.files))
    whole = path.read_bytes()
    path.write_bytes(data.draw(damaged(whole)))
    before = {each: state(each) for each in reader.files}
    try:
        check_read_or_refused(reader.read)
        assert {each: state(each) for each in reader.files} == before
    finally:
        path.write_bytes(whole)
