"""Becomes a command that cannot change the user's files, and neither can what that command starts.

``python -I -S protected_process.py MODE FOLDERS COMMAND...``, where FOLDERS is JSON of three entries. In ``discarded``
folders the command sees what it writes, and nobody else does; in ``writable`` ones it writes as ever; everywhere else
it can only read. ``memory`` is a folder to mount the memory on that holds what is discarded.

``namespace``: a mount namespace of its own (of a user namespace for an ordinary user) in which every mount is
read-only, with an overlay over each discarded folder. It ends with its last process. ``landlock``: where the kernel or
a policy forbids namespaces, Landlock, which has no overlays: discarded folders can only be read, too.

It uses only the standard library and has one thread, as the kernel demands.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import struct
import sys
from collections.abc import Sequence

VARIABLE = "DPSIM_PROTECTED"
"""Is set, to the mode, in the environment of what runs so."""

FAILED = 125
"""The exit code where the mode is not to be had here."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = -100, 0x8000, 1
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_PR_SET_NO_NEW_PRIVS = 38
_LANDLOCK_WRITES = 1 << 1 | sum(1 << bit for bit in range(4, 13))
"""To write a file, to remove and to make anything."""
_LANDLOCK_LATER = {2: 1 << 13, 3: 1 << 14}
"""By version: to move between folders (always forbidden before), to truncate."""

_libc = ctypes.CDLL(None, use_errno=True)


def in_namespace(discarded: Sequence[str], writable: Sequence[str], memory: str) -> None:
    """Enter a mount namespace where nothing but the two kinds of folders can be written. Raises ``OSError``."""
    current = os.getcwd()
    is_user = not _unshared()
    _mount(None, "/", None, _MS_REC | _MS_SLAVE)  # mounts of the machine come in, none gets out
    points = _mount_points()
    originals = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in {*discarded, *writable}}
    _set_read_only("/", 1, recursive=True)
    if discarded:
        _mount("tmpfs", memory, "tmpfs", 0, "mode=700")
        memory_handle = os.open(memory, os.O_PATH | os.O_DIRECTORY)
    overlaid = dict[str, bool]()
    for number, path in enumerate(sorted(originals, key=lambda path: path.count("/"))):  # folders before those in them
        original = f"/proc/self/fd/{originals[path]}"
        if path not in discarded:
            _mount(original, path, None, _MS_BIND | _MS_REC)
            _set_read_only(path, 0)
            overlaid[path] = False
        elif not _inside_overlay(path, overlaid) and not any(point.startswith(f"{path}/") for point in points):
            with contextlib.suppress(OSError):  # it stays read-only where its file system takes no overlay
                _overlay(original, path, f"/proc/self/fd/{memory_handle}/{number}", is_user=is_user)
                overlaid[path] = True
    os.chdir(current)


def _unshared() -> bool:
    """Enter a mount namespace; returns whether without a user namespace, which maps this user alone."""
    if _libc.unshare(_CLONE_NEWNS) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)
    return False


def _inside_overlay(path: str, overlaid: dict[str, bool]) -> bool:
    """Return whether the folder that was mounted last above ``path`` is an overlay, which holds ``path`` too."""
    above = [folder for folder in overlaid if path.startswith(f"{folder}/")]
    return bool(above) and overlaid[max(above, key=len)]


def _overlay(lower: str, path: str, layer: str, *, is_user: bool) -> None:
    """Mount an overlay over ``path`` that keeps what is written in the folder ``layer``."""
    shown = os.stat(lower)
    os.mkdir(layer)
    for folder in (upper := f"{layer}/upper", work := f"{layer}/work"):
        os.mkdir(folder)
    with contextlib.suppress(PermissionError):
        os.chown(upper, shown.st_uid, shown.st_gid)
    os.chmod(upper, shown.st_mode & 0o7777)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}" + ",userxattr" * is_user
    _mount("overlay", path, "overlay", 0, options)


def _mount_points() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        paths = [line.split(" ")[4] for line in mounts]
    return [re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path) for path in paths]


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, options)]
    _check(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), target)


def _set_read_only(path: str, value: int, *, recursive: bool = False) -> None:
    attributes = struct.pack("4Q", value * _MOUNT_ATTR_RDONLY, (1 - value) * _MOUNT_ATTR_RDONLY, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    call = (_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), recursive * _AT_RECURSIVE, attributes, size)
    _check(_libc.syscall(*call), path)


def by_landlock(discarded: Sequence[str], writable: Sequence[str]) -> None:
    """Give up writing anywhere but in the ``writable`` folders that hold no discarded one. Raises ``OSError``."""
    version = _check(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "landlock")
    rights = _LANDLOCK_WRITES | sum(right for since, right in _LANDLOCK_LATER.items() if version >= since)
    rules = _check(_libc.syscall(_LANDLOCK_CREATE, struct.pack("Q", rights), ctypes.c_size_t(8), 0), "landlock")
    for path in writable:
        if not any(f"{folder}/".startswith(f"{path}/") for folder in discarded):
            handle = os.open(path, os.O_PATH)
            _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, handle), 0), path)
            os.close(handle)
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)
    return result


def main(mode: str, folders: str, *command: str) -> None:
    request = json.loads(folders)
    try:
        if mode == "namespace":
            in_namespace(request["discarded"], request["writable"], request["memory"])
        else:
            by_landlock(request["discarded"], request["writable"])
    except (OSError, AttributeError) as error:  # AttributeError: the C library is not Linux's
        print(f"{mode}: {error}", file=sys.stderr)
        sys.exit(FAILED)
    os.environ[VARIABLE] = mode
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
