"""WebDataset: in a tar, members beside each other that share a key are a sample.

The key is WebDataset's, up to the first dot of the last part of the name, unless ``--stem last-dot`` was
said; members without an extension are passed over, as WebDataset does. A tar that is not compressed, of some
million samples at most, and in which no key comes twice, can be a shard as it is.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from itertools import groupby

from p2p_dmc.data.found import FileField, WholeTar
from p2p_dmc.data.index import MAX_SAMPLES, tar_bytes_of
from p2p_dmc.data.manifest import MAX_SHARD_BYTES
from p2p_dmc.data.readers.base import COMPRESSIONS, Input, Record, malformed, refuse_pickle
from p2p_dmc.data.readers.names import split_member, split_name
from p2p_dmc.data.tar import TRAILER, padded
from p2p_dmc.data.walk import Entry
from p2p_dmc.errors import UserError

_Member = tuple[str, FileField]


class TarReader:
    """A reader that also notes, in ``whole``, which tars can be shards as they are; None if one cannot.

    Whether a key comes twice in one is not known here.
    """

    def __init__(self) -> None:
        self.whole: list[WholeTar] | None = []

    def __call__(self, given: Input) -> Iterator[Record]:
        for entry in given.entries:
            count = 0
            with malformed(entry.path, "tar"):
                for key, members in groupby(_members(given, entry), key=lambda member: member[0]):
                    count += 1
                    yield key, _fields(entry, key, members)
                fits = entry.size <= MAX_SHARD_BYTES >> 1 and 1 <= count <= MAX_SAMPLES
                if _is_compressed(entry) or not fits:
                    self.whole = None
                elif self.whole is not None:
                    self.whole.append(_whole(entry, count))


def _whole(entry: Entry, count: int) -> WholeTar:
    """The tar without an index that this program has put behind it."""
    with open(entry.path, "rb", buffering=0) as file:
        size = tar_bytes_of(file.fileno())
        end = os.pread(file.fileno(), len(TRAILER), max(0, size - len(TRAILER)))
    filled = padded(size) - size
    is_ended = filled == 0 and end == TRAILER
    return WholeTar(entry.path, size, 0 if is_ended else filled + len(TRAILER), count)


def _is_compressed(entry: Entry) -> bool:
    return entry.path.lower().endswith((*COMPRESSIONS, ".tgz"))


def _fields(entry: Entry, key: str, members: Iterator[_Member]) -> list[FileField]:
    fields: dict[str, FileField] = {}
    for _, one in members:
        if one.extension in fields:
            raise UserError(f"{entry.path!r}: two members are field {one.extension!r} of {key!r}; rename one")
        fields[one.extension] = one
    return list(fields.values())


def _members(given: Input, entry: Entry) -> Iterator[_Member]:
    is_compressed = _is_compressed(entry)
    with (
        given.open(entry) as stream,
        tarfile.open(
            fileobj=stream, mode="r|" if is_compressed else "r:", encoding="utf-8", errors="surrogateescape"
        ) as tar,
    ):
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # it would remember them all
            if not member.isfile():
                given.skipped.special += not member.isdir()
                continue
            split = _split(given, member.name)
            if split is None:
                given.skipped.unused += 1
                continue
            if member.issparse():
                raise UserError(
                    f"{entry.path!r}: {member.name!r} is stored as a sparse file; pack it without"
                )
            refuse_pickle(f"{entry.path}/{member.name}")
            key, extension = split
            if is_compressed:
                file = tar.extractfile(member)
                assert file is not None
                yield key, given.spool.put_stream(extension, file)
            else:
                yield key, FileField(extension, entry.path, member.size, member.offset_data)


def _split(given: Input, name: str) -> tuple[str, str] | None:
    if given.stem != "last-dot":
        return split_member(name)
    folder, slash, last = name.rpartition("/")
    stem, extension = split_name(last)
    return folder + slash + stem, extension
