"""The events of a trace file of PyTorch's profiler (Kineto's Chrome trace), one after the other, in bounded memory.

The file is read in pieces, and no more of it is held than the value that is being read. Text is taken as Latin-1: every
byte is one character, so places in the text are bytes of the file, and no byte is invalid. All names that matter are
ASCII.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dpsim.errors import FileFormatError

CHUNK_BYTES = 2**20
LARGEST_VALUE_BYTES = 2**22
MOST_UNCHECKED_BYTES = 2**22
_MOST_PACKED = 100
"""Traces are packed to a tenth or a twentieth; what unpacks to so many times its bytes is no trace."""
_GZIP = b"\x1f\x8b"
_VISIBLE = re.compile(r"[^ \t\n\r]")
_OPEN_NUMBER = re.compile(r"[-+.0-9eE]*\Z")
_DECODER = json.JSONDecoder(strict=False)  # names of kernels may contain control characters


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its number in the file (from 1), the byte of the text at which it begins, and what it says."""

    number: int
    byte: int
    fields: dict[str, Any]


@dataclass
class Text:
    """The part of a JSON text that is being read: ``buffer`` from ``at`` on; ``start`` is the byte of its beginning."""

    name: str
    chunks: Iterator[bytes]
    buffer: str = ""
    at: int = 0
    start: int = 0

    @property
    def byte(self) -> int:
        """The byte of the text at which reading goes on."""
        return self.start + self.at

    def more(self) -> bool:
        """Read on, by at least as much as is being held; False at the end of the text."""
        self.start, self.buffer, self.at = self.byte, self.buffer[self.at :], 0
        pieces, size, wanted = [self.buffer], 0, max(len(self.buffer), 1)
        while size < wanted and (chunk := next(self.chunks, None)) is not None:
            pieces.append(chunk.decode("latin-1"))
            size += len(chunk)
        self.buffer = "".join(pieces)
        return size > 0

    def next_character(self) -> str:
        """The next character that is not white space, which stays to be read; empty at the end."""
        while True:
            visible = _VISIBLE.search(self.buffer, self.at)
            self.at = visible.start() if visible else len(self.buffer)
            if visible:
                return visible[0]
            if not self.more():
                return ""

    def expect(self, characters: str, where: str) -> str:
        """Read one of these characters and return it. Raises ``FileFormatError``."""
        character = self.next_character()
        if not character:
            raise self.refuse(f"the text ends {where}")
        if character not in characters:
            raise self.refuse(f"there is {character!r} {where}, and not {' or '.join(map(repr, characters))}")
        self.at += 1
        return character

    def value(self, what: str) -> Any:
        """Read the JSON value that begins here. Raises ``FileFormatError``."""
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
            except RecursionError:
                raise self.refuse(f"{what} is nested too deeply") from None
            except ValueError as error:
                if len(self.buffer) - self.at > LARGEST_VALUE_BYTES:
                    raise self.refuse(f"{what} is damaged, or has more than {LARGEST_VALUE_BYTES:,} bytes") from error
                if not self.more():
                    reason = error.msg if isinstance(error, json.JSONDecodeError) else "it holds no valid number"
                    raise self.refuse(f"{what} is cut short or damaged: {reason}") from error
            else:
                length = end - self.at
                if _OPEN_NUMBER.match(self.buffer, end) and self.more():
                    continue  # a number may go on in what was read now
                self.at += length
                return value

    def refuse(self, what: str) -> FileFormatError:
        """The error of a text that is no whole trace."""
        return FileFormatError(
            f"{self.name}, byte {self.byte}: {what}",
            allowed="a whole trace as torch.profiler's export_chrome_trace writes it (.json or .json.gz)",
            remedy="copy the file again, or record it again and let the profiler end before the process does",
        )


def read_events(text: Text, header: dict[str, Any]) -> Iterator[Event]:
    """The events of a trace, which are ``traceEvents`` of an object or a plain array.

    The keys that ``header`` has get what the object says of them, once it was read. Raises ``FileFormatError``.
    """
    if text.expect("{[", "where a trace begins") == "[":
        yield from _items(text)
    else:
        seen = False
        for key in _keys(text):
            if key == "traceEvents":
                if seen:
                    raise text.refuse("the object has traceEvents twice")
                seen = True
                text.expect("[", "after traceEvents")
                yield from _items(text)
            else:
                value = text.value(f"the value of {key[:40]!r}")
                if key in header:
                    header[key] = value
        if not seen:
            raise text.refuse("the object has no traceEvents")
    if text.next_character():
        raise text.refuse("the trace has ended, but the text goes on")


def _keys(text: Text) -> Iterator[str]:
    """The keys of an object whose brace was read; whoever gets one reads its value. A comma at the end is allowed."""
    while text.next_character() != "}":
        key = text.value("a key")
        if not isinstance(key, str):
            raise text.refuse("a key is not a text")
        text.expect(":", f"after the key {key[:40]!r}")
        yield key
        if text.expect(",}", f"after the value of {key[:40]!r}") == "}":
            return
    text.expect("}", "at the end of an object")


def _items(text: Text) -> Iterator[Event]:
    """The events of an array whose bracket was read. A comma at the end is allowed, as Chrome allows it."""
    number = 0
    while text.next_character() != "]":
        number += 1
        byte = text.byte
        fields = text.value(f"event {number}")
        if not isinstance(fields, dict):
            raise text.refuse(f"event {number} is not an object")
        yield Event(number, byte, fields)
        if text.expect(",]", f"after event {number}") == "]":
            return
    text.expect("]", "at the end of the events")


def open_trace(path: Path) -> Text:
    """The text of a trace file, plain or packed by gzip. Raises ``FileFormatError``, also later while it is read."""
    return Text(str(path), _chunks(path))


def _chunks(path: Path) -> Iterator[bytes]:
    size = 0
    try:
        with path.open("rb") as file:
            packed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            source: BinaryIO | gzip.GzipFile = gzip.GzipFile(fileobj=file) if packed else file
            while chunk := source.read(CHUNK_BYTES):
                size += len(chunk)
                if packed and size > max(MOST_UNCHECKED_BYTES, _MOST_PACKED * file.tell()):
                    raise _refuse_packed(path, size, file.tell())
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFormatError(
            f"{path}: the gzip file is cut short or damaged after {size} bytes of text ({error})",
            allowed="a whole .json.gz file",
            remedy="copy the file again, or record it again and let the profiler end before the process does",
        ) from error
    except OSError as error:
        raise FileFormatError(
            f"cannot read the trace {path}: {error.strerror or error}", allowed="a file that torch.profiler wrote"
        ) from error


def _refuse_packed(path: Path, text_bytes: int, packed_bytes: int) -> FileFormatError:
    return FileFormatError(
        f"{path}: its first {packed_bytes:,} bytes unpack to {text_bytes:,} bytes of text, as those of no trace do",
        allowed=f"a gzip file that unpacks to at most {_MOST_PACKED} times its bytes",
        remedy="record it again; if it is a trace, unpack it with gunzip and give the .json file",
    )
