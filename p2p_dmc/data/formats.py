"""What a sample is: the files of one folder that share a stem, one field per extension (DESIGN section 9).

The stem is the name up to its last dot (``stem="first-dot"`` for WebDataset's rule, up to the first one);
the rest, lower-cased, names the field. A name without a usable dot ("Makefile", "end.") is a stem as a whole
and its field is ``bin``. A sample's key is its path relative to the scanned folder, without extension, with
"/" between the parts on every system; names that are not valid UTF-8 are carried as surrogate escapes.

Not taken, but counted: names with a leading dot (a hidden folder counts once), links that lead out of the
tree, dangling links and links to folders (what they show inside the tree is there under its own name, and
following none of them makes loops harmless), files no ``include`` pattern matches, and what is not a file.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from p2p_dmc.data.manifest import MAX_FIELDS, MAX_KEY_BYTES, class_of, encode_key
from p2p_dmc.errors import UserError

StemRule = Literal["last-dot", "first-dot"]
FileField = tuple[str, str, int]  # (extension, path, size in bytes)

NO_EXTENSION = "bin"
_RESERVED = frozenset({"__key__", "__shard__"})


@dataclass(slots=True)
class Skipped:
    """How many entries were passed over, by reason."""

    hidden: int = 0
    links: int = 0
    excluded: int = 0
    special: int = 0

    @property
    def total(self) -> int:
        return self.hidden + self.links + self.excluded + self.special


@dataclass(frozen=True, slots=True)
class ScannedSample:
    """One sample on disk. ``fields`` is sorted by extension; ``group`` is what folder mode keeps together."""

    key: str
    group: str
    fields: tuple[FileField, ...]


@dataclass(frozen=True, slots=True)
class Scan:
    """What `scan` found. ``samples`` is sorted by the bytes of their keys, whatever the directory order."""

    root: Path
    samples: tuple[ScannedSample, ...]
    skipped: Skipped = field(default_factory=Skipped)

    @property
    def total_bytes(self) -> int:
        """Bytes in all fields together."""
        return sum(size for sample in self.samples for _, _, size in sample.fields)

    @property
    def extensions(self) -> tuple[str, ...]:
        """The fields seen, sorted."""
        return tuple(sorted({extension for sample in self.samples for extension, _, _ in sample.fields}))

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the top-level folders, sorted, as ImageFolder counts classes."""
        return tuple(sorted({name for sample in self.samples if (name := class_of(sample.key)) is not None}))


def split_name(name: str, rule: StemRule = "last-dot") -> tuple[str, str]:
    """``(stem, extension)`` of a file name, see the module's docstring."""
    dot = name.find(".", 1) if rule == "first-dot" else name.rfind(".")
    if dot <= 0 or dot == len(name) - 1:
        return name, NO_EXTENSION
    return name[:dot], name[dot + 1 :].lower()


def group_of(key: str, depth: int) -> str:
    """The folder at ``depth`` (1 is top level) that holds the key, or its own folder where that is less deep.

    A loose file beside the top-level folders is a group of its own, ``./<stem>``, so that many loose files
    can spread over shards.
    """
    folders = key.split("/")[:-1]
    return "/".join(folders[:depth]) if folders else f"./{key}"


def scan(path: Path, *, stem: StemRule = "last-dot", include: Sequence[str] = (), depth: int = 1) -> Scan:
    """Find the samples of a folder, or of one file (which is one sample).

    ``include``: glob patterns matched against the relative path, where ``*`` crosses folders and a leading
    ``**/`` also matches nothing; a file is taken if any matches, all are if there is none. Raises UserError
    for a path that does not exist, an unreadable file or folder, a sample of more than 16 files, two files
    for one field, and when nothing is left.
    """
    if depth < 1:
        raise UserError(f"--depth {depth}: the depth counts folders from 1, the top level; use 1 or more")
    skipped = Skipped()
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{str(path)!r}: {error.strerror}; give an existing folder or file") from error
    if stat.S_ISDIR(mode):
        root = path.resolve()
        files = _walk(str(root), _matcher(include), skipped)
    else:
        root = path.resolve().parent
        files = iter([(path.resolve().name, str(path.resolve()), path.stat().st_size)])
    samples = _group_files(files, stem, depth)
    if not samples:
        raise UserError(
            f"{str(path)!r}: no samples found ({_describe(skipped)}); check the path and --include"
        )
    return Scan(root=root, samples=samples, skipped=skipped)


def _describe(skipped: Skipped) -> str:
    return (
        f"passed over: {skipped.hidden} hidden, {skipped.links} links leaving the tree or to folders, "
        f"{skipped.excluded} not matching --include, {skipped.special} special files"
    )


def _matcher(include: Sequence[str]) -> Callable[[str], bool]:
    patterns = list(include)
    patterns += [pattern[3:] for pattern in include if pattern.startswith("**/")]
    compiled = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]
    return lambda relative: not compiled or any(match(relative) for match in compiled)


def _walk(root: str, wanted: Callable[[str], bool], skipped: Skipped) -> Iterator[tuple[str, str, int]]:
    """Yields (relative path, path, size) of every file taken, folder by folder in name order."""
    folders = [""]
    while folders:
        folder = folders.pop()
        for entry in _list_folder(os.path.join(root, folder)):
            relative = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                skipped.hidden += 1
            elif not entry.is_symlink() and entry.is_dir():
                folders.append(relative)
            elif not wanted(relative):
                skipped.excluded += 1
            elif entry.is_symlink() and not _leads_to_file_inside(entry.path, root):
                skipped.links += 1
            elif not entry.is_file():
                skipped.special += 1
            else:
                yield relative, entry.path, _readable_size(entry.path)


def _list_folder(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder!r}: {error.strerror}; make the folder readable or move it away") from error


def _leads_to_file_inside(link: str, root: str) -> bool:
    target = os.path.realpath(link)
    return target.startswith(root.rstrip(os.sep) + os.sep) and os.path.isfile(target)


def _readable_size(path: str) -> int:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path!r}: {error.strerror}; scan again when nothing changes the folder") from error
    if not os.access(path, os.R_OK):
        raise UserError(f"{path!r}: permission denied; make the file readable or exclude it with --include")
    return size


def _group_files(
    files: Iterator[tuple[str, str, int]], rule: StemRule, depth: int
) -> tuple[ScannedSample, ...]:
    by_key: defaultdict[str, dict[str, FileField]] = defaultdict(dict)
    for relative, path, size in files:
        folder, slash, name = relative.rpartition("/")
        stem, extension = split_name(name, rule)
        fields = by_key[folder + slash + stem]
        if extension in _RESERVED:
            raise UserError(f"{path!r}: the extension {extension!r} is reserved; rename the file")
        if extension in fields:
            raise UserError(
                f"{fields[extension][1]!r} and {path!r} would both be field {extension!r} of one sample; "
                f"rename one of them"
            )
        fields[extension] = (extension, path, size)
        if len(fields) > MAX_FIELDS:
            raise UserError(
                f"sample {folder + slash + stem!r}: more than {MAX_FIELDS} files share this stem; "
                f"rename them, or choose another rule with --stem"
            )
    samples = [
        ScannedSample(key, group_of(key, depth), tuple(fields[extension] for extension in sorted(fields)))
        for key, fields in sorted(by_key.items(), key=lambda item: encode_key(item[0]))
    ]
    for sample in samples:
        if len(encode_key(sample.key)) > MAX_KEY_BYTES:
            raise UserError(f"{sample.fields[0][1]!r}: path longer than {MAX_KEY_BYTES} bytes; shorten it")
    return tuple(samples)
