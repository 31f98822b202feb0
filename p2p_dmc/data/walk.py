"""The files of a folder that are taken, and what is passed over (DESIGN section 9).

Not taken, but counted: names with a leading dot (a hidden folder counts once), links that lead out of the
tree, dangling links and links to folders (what they show inside the tree is there under its own name, and
following none of them makes loops harmless), files that no ``include`` or some ``exclude`` pattern matches,
and what is not a file.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from p2p_dmc.data.found import Skipped
from p2p_dmc.data.spill import Log
from p2p_dmc.errors import UserError

Wanted = Callable[[str], bool]


class Entry(NamedTuple):
    """A file: its path relative to the folder, with "/", its path, size in bytes and time (ns)."""

    relative: str
    path: str
    size: int
    mtime_ns: int

    @property
    def name(self) -> str:
        return self.relative.rpartition("/")[2]


def wanted_by(include: Sequence[str], exclude: Sequence[str] = ()) -> Wanted:
    """Whether a relative path is taken: by some ``include`` pattern, if there is one, and by no ``exclude``.

    ``*`` crosses folders and a leading ``**/`` also matches nothing.
    """
    takes, leaves = _compiled(include), _compiled(exclude)

    def wanted(relative: str) -> bool:
        taken = not takes or any(match(relative) for match in takes)
        return taken and not any(match(relative) for match in leaves)

    return wanted


def _compiled(patterns: Sequence[str]) -> list[Callable[[str], object]]:
    both = [*patterns, *(pattern[3:] for pattern in patterns if pattern.startswith("**/"))]
    return [re.compile(fnmatch.translate(pattern)).match for pattern in both]


def entry_of(path: Path) -> Entry:
    """One file by itself. Raises UserError."""
    resolved = path.resolve()
    return Entry(resolved.name, str(resolved), *_readable(str(resolved)))


def walk(root: str, wanted: Wanted, skipped: Skipped) -> Iterator[Entry]:
    """Every file taken, folder by folder, in no order. Raises UserError."""
    folders, place = Log(None), 0
    folders.append(b"")
    while place < folders.end:
        stop = folders.end
        for folder in map(os.fsdecode, folders.read(place, stop)):
            for found in _list_folder(os.path.join(root, folder)):
                relative = f"{folder}/{found.name}" if folder else found.name
                if found.name.startswith("."):
                    skipped.hidden += 1
                elif not found.is_symlink() and found.is_dir():
                    folders.append(os.fsencode(relative))
                elif not wanted(relative):
                    skipped.excluded += 1
                elif found.is_symlink() and not _leads_to_file_inside(found.path, root):
                    skipped.links += 1
                elif not found.is_file():
                    skipped.special += 1
                else:
                    yield Entry(relative, found.path, *_readable(found.path))
        place = stop


def _list_folder(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise UserError(f"{folder!r}: {error.strerror}; make the folder readable or move it away") from error


def _leads_to_file_inside(link: str, root: str) -> bool:
    target = os.path.realpath(link)
    return target.startswith(root.rstrip(os.sep) + os.sep) and os.path.isfile(target)


def _readable(path: str) -> tuple[int, int]:
    """Size in bytes and time (ns)."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(f"{path!r}: {error.strerror}; scan again when nothing changes the folder") from error
    if not os.access(path, os.R_OK):
        raise UserError(f"{path!r}: permission denied; make the file readable or leave it out with --exclude")
    return status.st_size, status.st_mtime_ns
