"""Files of the nouns: strict JSON or TOML in, JSON out; written whole or not at all.

Infinity is the string ``"inf"``. Unknown keys fail and name the nearest known one.
"""

from __future__ import annotations

import difflib
import errno
import functools
import hashlib
import json
import math
import os
import re
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from dpsim.errors import ConfigError, DpsimError, FileFormatError, FormatVersionError
from dpsim.packing import Unpacking, columns_text
from dpsim.units import parse_bandwidth, parse_duration

T = TypeVar("T", bound="Noun")
Kind = TypeVar("Kind")
PARTIAL = ".partial"
SIGNIFICANT_DIGITS = 9
"""Digits of the numbers that the digest of predictions is of."""
_NOTHING = 1e-15
"""What is less is the rest of a difference of equal numbers: as seconds, a femtosecond."""
_DEEPEST = 100
_REMEDIES = {
    "machine": "make it again if it is cut off; from a log of nccl-tests, OSU or IMB: dpsim calibrate --from FILE"
}
"""What to do about a file that is no JSON, where it may be one of another kind."""
_PLAIN, _INFINITE = {bool, int, float, str}, (math.inf, -math.inf)
_fields = functools.cache(msgspec.structs.fields)
_COLUMN = re.compile(r"\[\n[^][{}]*\]")
"""An array without others inside. A line break in JSON is never within a text."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that is stored: frozen, keyword-only, strict about unknown keys."""


def _no_inf(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        return "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {k: v if type(v) in _PLAIN and v not in _INFINITE and v == v else _no_inf(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [v if type(v) in _PLAIN and v not in _INFINITE and v == v else _no_inf(v) for v in value]
    return value


def _with_inf(value: Any) -> Any:
    if value == "inf":
        return math.inf
    if isinstance(value, dict):
        return {k: _with_inf(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_inf(v) for v in value]
    return value


def _with_units(value: Any, key: str = "") -> Any:
    """Replace durations and bandwidths written as text in a TOML file by numbers. Raises ``ConfigError``."""
    if isinstance(value, dict):
        return {name: _with_units(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_units(each, key) for each in value]
    if not isinstance(value, str) or not key.endswith("_s") or value == "inf":
        return value
    return parse_bandwidth(value) if key.endswith("bytes_per_s") else parse_duration(value)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def _of_text(kind: type[Any], value: Any) -> Any:
    if isinstance(value, str):
        return kind(value)
    raise TypeError(f"Expected `str`, got `{type(value).__name__}`")


def to_builtins(value: Any) -> Any:
    """Return plain dicts, lists, strings and finite numbers of any noun (infinity becomes ``"inf"``)."""
    return _no_inf(msgspec.to_builtins(value, enc_hook=_as_text))


def convert(raw: Any, kind: type[Kind], *, strict: bool = True) -> Kind:
    """Return the noun of plain values; a kind of text, such as a layout, is made of its text."""
    return msgspec.convert(raw, kind, strict=strict, dec_hook=_of_text, str_keys=True)


def to_json(value: Any, *, indent: int | None = 1) -> str:
    """Return JSON text of a noun or of plain values; always valid JSON (no NaN, no Infinity)."""
    text = json.dumps(to_builtins(value), ensure_ascii=False, allow_nan=False)
    return text if indent is None else msgspec.json.format(text, indent=indent)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's canonical JSON, without the fields of nouns that have their default value.

    So the digest of a record stays the same when a later version of dpsim adds a field with a default. A record that
    states a ``model_version`` is hashed of numbers with ``SIGNIFICANT_DIGITS``, so that processors and libraries whose
    last digits differ agree; records from before versions were stated are hashed of every digit, as they were then.
    """
    essential = to_builtins(_without_defaults(value))
    if getattr(value, "model_version", 0):
        essential = rounded(essential)
    text = json.dumps(essential, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def rounded(value: Any) -> Any:
    """Return plain values with each fraction rounded to ``SIGNIFICANT_DIGITS``; what is below 1e-15 becomes 0."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if abs(value) >= _NOTHING else 0.0
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def _without_defaults(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        essential = {} if config.tag is None else {str(config.tag_field): config.tag}
        for field in _fields(type(value)):
            present = getattr(value, field.name)
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            if default is msgspec.NODEFAULT or present != default:
                essential[field.encode_name] = _without_defaults(present)
        return essential
    if isinstance(value, dict):
        return {key: _without_defaults(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [each if type(each) in _PLAIN else _without_defaults(each) for each in value]
    return value


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all: a reader sees the old file or the new one, even after a kill or a crash.

    It writes a temporary file in the same folder, syncs it, renames it and syncs the folder. If it raises ``OSError``,
    it leaves nothing behind. A link stays a link: its target is written. A device or a pipe is written into.
    """
    if (path.exists() and not path.is_file()) or path.absolute().is_relative_to("/dev"):  # /dev/stdout may be a file
        with path.open("wb") as stream:
            stream.write(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises ``ConfigError``."""
    write_output(path, text.encode("utf-8"))


def write_output(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, as ``write_bytes`` does. Raises ``ConfigError``."""
    try:
        write_bytes(path, data)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}",
            allowed="a path in a folder that you may write to",
            remedy="choose another one with --output",
        ) from error


def write(path: Path, value: Any) -> None:
    """Write a noun as JSON, atomically, with each column of numbers on a line of its own."""
    write_json(path, to_json(value))


def write_json(path: Path, text: str) -> None:
    """Write the text of ``to_json``, atomically, with each column of numbers on a line of its own."""
    write_text(path, _COLUMN.sub(lambda column: re.sub(r"\n *", "", column[0]), text) + "\n")


def write_record(path: Path, value: Any) -> None:
    """Write the noun of a study as JSON, atomically, in the columns of ``dpsim.packing``; ``read`` reads both."""
    write_text(path, record_text(value))


def record_text(value: Any) -> str:
    """Return the text of a record."""
    return columns_text(to_builtins(value)) + "\n"


def read_raw(path: Path, what: str) -> Any:
    """Return the plain content of a ``.json`` or ``.toml`` file. Raises ``FileFormatError``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"cannot read the {what} file {path}: {error.strerror or error}",
            allowed=f"an existing .json or .toml {what} file",
        ) from error
    try:
        text = data.decode("utf-8")
        raw = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
        _check_depth(raw)
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise FileFormatError(
            f"the {what} file {path} is not valid {kind}: {error}",
            allowed=f"{_a(what)} file as dpsim writes it or as docs describe it",
            remedy=_REMEDIES.get(what, "it may be cut off or damaged: make it again"),
        ) from error
    return raw


def parse_json(text: str) -> Any:
    """Return the values of a JSON text. Raises ``ValueError`` for NaN, infinity, deep nesting, lone surrogates."""
    try:
        raw = json.loads(text, parse_constant=_refuse_constant, object_hook=Unpacking(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(raw)
    if _SURROGATE.search(text):
        json.dumps(raw, ensure_ascii=False).encode()  # half a pair raises UnicodeEncodeError
    return raw


def _check_depth(raw: Any) -> None:
    level = [raw]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if level:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f'{name} is not a JSON number; write infinity as the string "inf"')


def decode(raw: Any, kind: type[T], what: str) -> T:
    """Decode a noun from plain values, strictly. Raises ``FileFormatError``, which names the field."""
    try:
        return convert(_with_inf(raw), kind)
    except UnicodeEncodeError as error:
        raise FileFormatError(f"bad {what}: a text that is not Unicode: {error}") from error
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, DpsimError):
            raise FileFormatError(f"bad {what}: {error.__cause__}") from error
        text = str(error)
        match = re.search(r"unknown field `([^`]*)`", text)
        hint = f"see the format of {_a(what)} in the documentation"
        if match:
            keys = sorted(_known_keys(kind, set()))
            with_unit = [key for key in keys if key.startswith(f"{match.group(1)}_")]
            near = with_unit[:1] or difflib.get_close_matches(match.group(1), keys, n=1)
            if near:
                hint = f"did you mean {near[0]!r}?"
        word = re.search(r"Invalid enum value .*\.(\w+)`$", text)
        allowed = dict.fromkeys(_words(kind, word.group(1), set())) if word else ()
        raise FileFormatError(f"bad {what}: {text}", allowed=", ".join(allowed), remedy=hint) from error


def _a(what: str) -> str:
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _words(kind: Any, name: str, seen: set[Any]) -> list[str]:
    """Return the words that a field of this name may have, in a type or in those that it contains."""
    words: list[str] = []
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            if field.encode_name == name and get_origin(field.type) is Literal:
                words += map(str, get_args(field.type))
            words += _words(field.type, name, seen)
    for part in get_args(kind):
        words += _words(part, name, seen)
    return words


def _known_keys(kind: Any, seen: set[Any]) -> set[str]:
    keys: set[str] = set()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for field in msgspec.structs.fields(kind):
            keys.add(field.encode_name)
            keys |= _known_keys(field.type, seen)
    for part in getattr(kind, "__args__", ()):
        keys |= _known_keys(part, seen)
    return keys


def read(path: Path, kind: type[T], what: str, schema: str, *, convert: Callable[[Any], Any] = lambda raw: raw) -> T:
    """Read one noun from a JSON or TOML file; ``schema`` is the value its ``schema`` key must have.

    ``convert`` makes the plain values of today's format of those of an earlier one with the same schema.
    """
    raw = read_raw(path, what)
    if not isinstance(raw, dict) or raw.get("schema") != schema:
        schema_found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        kind_of_file, _, version = schema.partition("/")
        if isinstance(schema_found, str) and schema_found.startswith(f"{kind_of_file}/"):
            raise FormatVersionError(
                f"{path} has version {schema_found.partition('/')[2][:20]} of the format of {what} files",
                allowed=f"version {version}, schema = {schema!r}",
                remedy="make it again with this version of dpsim, or read it with the one that wrote it",
            )
        raise FileFormatError(
            f"{path} is not {_a(what)} file: its schema is {schema_found!r}",
            allowed=f"schema = {schema!r}",
            remedy="give a file of the right kind, or make it again with this version of dpsim",
        )
    try:
        return decode(convert(_with_units(raw) if path.suffix == ".toml" else raw), kind, what)
    except DpsimError as error:
        raise FileFormatError(f"{path}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error
