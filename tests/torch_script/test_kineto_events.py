"""The reader of traces: any pieces give the same events, and damage anywhere is one clear error. Needs no torch."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kineto_traces
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.errors import FileFormatError
from dpsim.torch.script.kineto import events as kineto
from dpsim.torch.script.kineto.events import Event, Text, open_trace, read_events

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
TRACES = st.fixed_dictionaries(
    {"schemaVersion": VALUES, "traceEvents": st.lists(st.dictionaries(st.text(), VALUES)), "traceName": VALUES}
)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        yield data[start:end]


def read(data: bytes, cuts: list[int] | None = None, header: dict[str, Any] | None = None) -> list[Event]:
    return list(read_events(Text("t", pieces(data, cuts or [])), {} if header is None else header))


@settings(max_examples=40)
@given(TRACES, st.lists(st.integers(0, 10**6), max_size=20), st.sampled_from([None, 1]))
def test_any_pieces_give_the_events_that_json_gives(trace: dict[str, Any], cuts: list[int], indent: int | None) -> None:
    data = json.dumps(trace, indent=indent).encode()
    header: dict[str, Any] = {"schemaVersion": None, "traceName": None}
    read_in_pieces = read(data, cuts, header)
    assert [event.fields for event in read_in_pieces] == trace["traceEvents"]
    assert header == {key: trace[key] for key in header}
    assert [event.number for event in read_in_pieces] == list(range(1, len(read_in_pieces) + 1))
    assert all(data[event.byte : event.byte + 1] == b"{" for event in read_in_pieces)


@settings(max_examples=40)
@given(TRACES, st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=3))
def test_a_trace_that_is_cut_short_anywhere_is_refused_with_the_place(
    trace: dict[str, Any], cut: int, cuts: list[int]
) -> None:
    data = json.dumps(trace).encode()
    with pytest.raises(FileFormatError, match="byte"):
        read(data[: cut % len(data)], cuts)


@settings(max_examples=40)
@given(TRACES, st.integers(0, 10**6), st.binary(min_size=1, max_size=3))
def test_damage_is_refused_or_leaves_a_trace(trace: dict[str, Any], place: int, put: bytes) -> None:
    data = json.dumps(trace).encode()
    place %= len(data)
    try:
        assert all(isinstance(event.fields, dict) for event in read(data[:place] + put + data[place + 1 :]))
    except FileFormatError as error:
        assert "byte" in error.given


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("", "byte 0: the text ends where a trace begins"),
        ("hello", "byte 0: there is 'h' where a trace begins"),
        ('{"a": 1}', "byte 8: the object has no traceEvents"),
        ('{"traceEvents": {}}', "byte 16: there is '{' after traceEvents"),
        ('{"traceEvents": [{}, 3]}', "byte 22: event 2 is not an object"),
        ('{"traceEvents": [{} {}]}', "byte 20: there is '{' after event 1"),
        ('{"traceEvents": [{"a": nul}]}', "byte 17: event 1 is cut short or damaged"),
        ('{"traceEvents": []} {', "byte 20: the trace has ended, but the text goes on"),
        ('[{"a": ' + "[" * 100_000, "byte 1: event 1 is nested too deeply"),
        ('[{"a": ' + "1" * 5000 + "}]", "byte 1: event 1 is cut short or damaged: it holds no valid number"),
        ('{3: 1, "traceEvents": []}', "byte 2: a key is not a text"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_byte(text: str, given: str) -> None:
    with pytest.raises(FileFormatError) as refused:
        read(text.encode())
    assert refused.value.given.startswith(f"t, {given}")
    assert "record it again" in refused.value.remedy


def test_a_plain_array_and_a_comma_at_the_end_are_read_as_chrome_reads_them() -> None:
    assert [event.fields for event in read(b'[{"a": 1},\n{"b": "\xc3\xa9\n"},]\n')] == [{"a": 1}, {"b": "Ã©\n"}]


def test_numbers_that_a_piece_divides_are_whole() -> None:
    header: dict[str, Any] = {"a": None}
    for text in ("12", "-1.25", "1e+05", "true"):
        data = b'{"a":' + text.encode() + b',"traceEvents":[]}'
        for cut in range(len(data)):
            assert read(data, [cut], header) == [] and header["a"] == json.loads(text)


def test_only_a_part_of_a_long_trace_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "CHUNK_BYTES", 4096)
    path = tmp_path / "long.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{"name": "x" * 50, "n": n} for n in range(20_000)]).encode()))
    text = open_trace(path)
    numbers, longest = [], 0
    for event in read_events(text, {}):
        numbers.append(event.fields["n"])
        longest = max(longest, len(text.buffer))
    assert numbers == list(range(20_000)) and longest < 4 * 4096


def test_an_event_longer_than_any_is_refused_before_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kineto, "LARGEST_VALUE_BYTES", 1000)

    def endless() -> Iterator[bytes]:
        yield b'[{"a": "'
        while True:
            yield b"x" * 100

    with pytest.raises(FileFormatError, match="byte 1: event 1 is damaged, or has more than 1,000 bytes"):
        list(read_events(Text("t", endless()), {}))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.9, 0.999])
def test_a_packed_trace_that_is_cut_short_is_refused(share: float, tmp_path: Path) -> None:
    path = kineto_traces.write(tmp_path / "t.json.gz", kineto_traces.host_step(1, 0))
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(
        FileFormatError, match=r"gzip file is cut short or damaged after|byte 0: the text ends|byte 0: there"
    ):
        list(read_events(open_trace(path), {}))


def test_a_packed_trace_with_a_wrong_byte_is_refused(tmp_path: Path) -> None:
    path = kineto_traces.write(tmp_path / "t.json.gz", kineto_traces.host_step(1, 0))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(FileFormatError):
        list(read_events(open_trace(path), {}))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot read the trace .*nowhere\.json: No such file"):
        list(read_events(open_trace(tmp_path / "nowhere.json"), {}))


def test_a_packed_trace_that_unpacks_to_far_more_than_any_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kineto, "MOST_UNCHECKED_BYTES", 2**20)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 2**23 + b"]"))
    with pytest.raises(FileFormatError, match=r"unpack to \d,\d{3},\d{3} bytes of text") as refused:
        list(read_events(open_trace(path), {}))
    assert "gunzip" in refused.value.remedy
    path.write_bytes(gzip.compress(b"[" + b" " * 2**19 + b"]"))
    assert list(read_events(open_trace(path), {})) == []
