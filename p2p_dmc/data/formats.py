"""Looking at an input: which format it is in, and its samples (DESIGN section 9; docs/datasets.md).

In a folder of files a sample is the files of one folder that share a stem, one field per extension. The stem
is the name up to its last dot (``stem="first-dot"``: up to the first one); the rest, lower-cased, names the
field. A name without a usable dot ("Makefile", "end.") is a stem as a whole and its field is ``bin``. A
sample's key is its path relative to the scanned folder, without extension, with "/" between the parts on every
system; names that are not valid UTF-8 are carried as surrogate escapes.

A folder of class folders that hold nothing but images is torchvision's ImageFolder: each image is a sample,
with the class's number as a field ``cls`` beside it.

All other formats have readers of their own, in `readers`. Their samples are numbered rows, or what the format
itself calls a key. A folder is of such a format if all its files are, read-me files aside.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Protocol

from p2p_dmc.data.found import FileField, Samples, Scan, Skipped, WholeTar
from p2p_dmc.data.index import decode_key, encode_key
from p2p_dmc.data.manifest import DIGEST_BYTES, MAX_CLASSES, class_of
from p2p_dmc.data.readers import arrays, arrow, lines, mds, tars
from p2p_dmc.data.readers.base import COMPRESSIONS, Input, Reader, Record, Spool, StemRule, refuse_pickle
from p2p_dmc.data.readers.names import split_name
from p2p_dmc.data.sources import changed, stamp_of
from p2p_dmc.data.spill import sort_records
from p2p_dmc.data.walk import Entry, Wanted, entry_of, walk, wanted_by
from p2p_dmc.errors import UserError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of the input


class Digest(Protocol):
    """What hashlib makes."""

    def update(self, data: bytes, /) -> None: ...


IMAGES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SPLITS = frozenset({"train", "val", "valid", "validation", "test", "dev"})
CLASS = "cls"
_ABOUT = re.compile(
    r"(readme|license|licence|notice|changelog|citation)\b.*|.*\.md|dataset_infos?\.json", re.I
)


@dataclass(frozen=True, slots=True)
class Format:
    """How files are recognised and read. ``alone``: only as the path given, since in folders such are fields.

    ``converts``: samples are not ranges of the files as they are; those of compressed files never are.
    """

    name: str
    endings: tuple[str, ...]
    reader: Callable[[], Reader]
    compressions: tuple[str, ...] = ()
    alone: bool = False
    converts: bool = False

    def fits(self, name: str) -> bool:
        """By the name of a file, in lower case."""
        for compression in self.compressions:
            name = name.removesuffix(compression)
        return name.endswith(self.endings)

    def converted_bytes(self, entries: Sequence[Entry]) -> int:
        """The size of the files that have to be converted or decompressed."""
        packed = (*COMPRESSIONS, ".tgz")
        return sum(one.size for one in entries if self.converts or one.name.lower().endswith(packed))


FORMATS = (
    Format("WebDataset", (".tar", ".tgz"), tars.TarReader, COMPRESSIONS),
    Format("JSONL", (".jsonl", ".ndjson"), lambda: lines.read_jsonl, COMPRESSIONS),
    Format("CSV", (".csv", ".tsv"), lambda: lines.read_csv, COMPRESSIONS, converts=True),
    Format("Parquet", (".parquet",), lambda: arrow.read_parquet, converts=True),
    Format("NumPy array", (".npy",), lambda: arrays.read_npy, alone=True),
    Format("NumPy arrays", (".npz",), lambda: arrays.read_npz, alone=True, converts=True),
)
TOKENS = Format("tokens", (".bin",), lambda: arrays.read_tokens)
SAVED = Format("Hugging Face save_to_disk", (".arrow",), lambda: arrow.read_saved, converts=True)


def scan(
    path: Path,
    *,
    stem: StemRule | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    depth: int = 1,
    spool: Spool | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Find the samples of a folder or of one file.

    ``include``, ``exclude``: glob patterns matched against the relative path, see `walk.wanted_by`. ``stem``
    None is the format's own rule. ``spool`` receives what a format has to convert; without one such samples
    can be planned and not written. Raises UserError for a path that does not exist, an unreadable or changing
    file, a file that is not what its name says, pickle, a sample of more than 16 files, two files for one
    field, a missing optional package, and when nothing is left.
    """
    if depth < 1:
        raise UserError(f"--depth {depth}: the depth counts folders from 1, the top level; use 1 or more")
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{str(path)!r}: {error.strerror}; give an existing folder or file") from error
    is_folder = stat.S_ISDIR(mode)
    if not is_folder and not stat.S_ISREG(mode):
        raise UserError(f"{str(path)!r}: no file and no folder; give one of them")
    spool, wanted = spool or Spool(None), wanted_by(include, exclude)
    root = path.resolve() if is_folder else path.resolve().parent
    marked = _marked_folder(root) if is_folder else None
    if marked is not None:
        form, reader, entries = marked
        given = Input(root, entries, spool, stem, is_one_file=form.name == "MDS")
    elif is_folder:
        found = _format_of_folder(str(root), wanted)
        if found is None:
            return _scan_files(path, root, wanted, stem or "last-dot", depth, spool.folder)
        form, reader, skipped = found, found.reader(), Skipped()
        entries = [entry for entry in walk(str(root), wanted, skipped) if _fits(form, entry)]
        given = Input(root, sorted(entries), spool, stem, skipped=skipped)
    else:
        entry = entry_of(path)
        refuse_pickle(entry.path)
        single = _format_of(entry, is_alone=True)
        if single is None:
            return _one_file(root, entry, stem or "last-dot", depth)
        form, reader = single, single.reader()
        given = Input(root, [entry], spool, stem, is_one_file=True)
    return _scan_records(path, form, reader, given, depth, progress)


# -- which format ------------------------------------------------------------------------------------------


def _format_of(entry: Entry, *, is_alone: bool) -> Format | None:
    name = entry.name.lower()
    for form in FORMATS:
        if form.fits(name) and (is_alone or not form.alone):
            return form
    return TOKENS if arrays.is_tokens(entry.path) else None


def _fits(form: Format, entry: Entry) -> bool:
    return form.fits(entry.name.lower())


def _format_of_folder(root: str, wanted: Wanted) -> Format | None:
    """The one format of all files; None if they are files to be carried as such."""
    found: Format | None = None
    is_beside_tokens = False
    for entry in walk(root, wanted, Skipped()):
        if _ABOUT.fullmatch(entry.name):
            continue
        form = _format_of(entry, is_alone=False)
        if form is None and entry.name.endswith((".idx", ".json", ".npy")):
            is_beside_tokens = True
        elif form is None or (found is not None and form is not found):
            return None
        else:
            found = form
    return None if is_beside_tokens and found is not TOKENS else found


def _marked_folder(root: Path) -> tuple[Format, Reader, list[Entry]] | None:
    """Formats of which a file of a certain name tells."""
    if arrow.saved_folders(root):
        return SAVED, arrow.read_saved, arrow.saved_files(root)
    if mds.is_mds(root):
        entries, said = mds.mds_files(root)
        reader = mds.MdsReader(said)
        return Format("MDS", (".mds",), lambda: reader, converts=True), reader, entries
    return None


# -- records -----------------------------------------------------------------------------------------------


def _scan_records(
    path: Path, form: Format, reader: Reader, given: Input, depth: int, progress: Progress | None
) -> Scan:
    total, done = sum(entry.size for entry in given.entries), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done = min(total, done + count)
        if progress is not None:
            progress(done, total)

    given.on_bytes = on_bytes
    given.spool.need(str(path), form.converted_bytes(given.entries))
    samples = Samples.of(reader(given), depth, given.spool.folder)
    if not samples:
        raise UserError(
            f"{str(path)!r}: {form.name} without a sample{_passed_over(given.skipped)}; check the path"
        )
    stamps = {entry.path: (entry.size, entry.mtime_ns) for entry in given.entries}
    for one, stamp in stamps.items():
        if stamp_of(os.stat(one)) != stamp:
            raise changed(one)
    if given.spool.finish():
        stamps[given.spool.path] = stamp_of(os.stat(given.spool.path))
    count = len(given.entries)
    return Scan(
        root=given.root,
        samples=samples,
        skipped=given.skipped,
        kind=form.name if count == 1 else f"{form.name} in {count} files",
        stamps=stamps,
        identity=_identity(given.root, given.entries),
        tars=_whole_tars(reader, samples, given.spool.folder),
        converted_bytes=given.spool.size_bytes,
        folder=given.spool.folder,
    )


def _whole_tars(reader: Reader, samples: Samples, folder: Path | None) -> tuple[WholeTar, ...]:
    """The tars that are shards as they are, if all are."""
    whole = reader.whole if isinstance(reader, tars.TarReader) else None
    for part in samples.cut(tar.samples for tar in whole or ()):
        for one, other in pairwise(sort_records(part.key_bytes(), folder)):
            if one == other:
                return ()
    return tuple(whole or ())


def _identity(root: Path, entries: Sequence[Entry]) -> bytes:
    state = hashlib.blake2b(encode_key(str(root)), digest_size=DIGEST_BYTES)
    for entry in entries:
        state.update(b"\0%b\0%d\0%d" % (encode_key(entry.relative), entry.size, entry.mtime_ns))
    return state.digest()


def _passed_over(skipped: Skipped) -> str:
    return f" (passed over: {skipped.describe() or 'nothing'})"


# -- files -------------------------------------------------------------------------------------------------


def _one_file(root: Path, entry: Entry, rule: StemRule, depth: int) -> Scan:
    samples = Samples.of(_grouped(_by_key(iter([entry]), rule), (), None), depth)
    return Scan(root=root, samples=samples, kind="one file", identity=_identity(root, [entry]))


class _NotImageFolderError(Exception):
    """A sample of several files."""


def _scan_files(
    path: Path, root: Path, wanted: Wanted, rule: StemRule, depth: int, folder: Path | None
) -> Scan:
    classes = _image_classes(str(root), wanted)
    state = hashlib.blake2b(encode_key(str(root)), digest_size=DIGEST_BYTES)

    def files(skipped: Skipped) -> Iterator[Entry]:
        for entry in walk(str(root), wanted, skipped):
            refuse_pickle(entry.path)
            yield entry

    def samples(classes: tuple[str, ...], skipped: Skipped) -> Samples:
        records = sort_records(_by_key(files(skipped), rule), folder)
        return Samples.of(_grouped(records, classes, state), depth, folder)

    try:
        found = samples(classes, skipped := Skipped())
    except _NotImageFolderError:
        classes = ()
        found = samples(classes, skipped := Skipped())
    if not found:
        raise UserError(
            f"{str(path)!r}: no samples found{_passed_over(skipped)}; check the path and --include"
        )
    kind = f"ImageFolder of {len(classes)} classes" if classes else "folder of files"
    return Scan(root=root, samples=found, skipped=skipped, kind=kind, identity=state.digest(), folder=folder)


_STATUS = struct.Struct("<Qq")  # size in bytes, time (ns)


def _by_key(files: Iterator[Entry], rule: StemRule) -> Iterator[bytes]:
    """A record for each file; in the order of their bytes the files of a sample come one after the other."""
    for entry in files:
        folder, slash, name = entry.relative.rpartition("/")
        stem, extension = split_name(name, rule)
        texts = (encode_key(folder + slash + stem), encode_key(extension), os.fsencode(entry.path))
        yield b"\0".join([*texts, _STATUS.pack(entry.size, entry.mtime_ns)])


def _grouped(records: Iterator[bytes], classes: tuple[str, ...], state: Digest | None) -> Iterator[Record]:
    """The samples of sorted files. ``classes``: of an ImageFolder, where a sample is one image."""
    numbers = {name: str(number).encode() for number, name in enumerate(classes)}
    for place, files in groupby(records, key=lambda record: record[: record.index(b"\0")]):
        fields: dict[str, FileField] = {}
        for record in files:
            _, field, path, _ = record.split(b"\0", 3)
            size, _ = _STATUS.unpack(record[-_STATUS.size :])
            if state is not None:
                state.update(record)
            one = FileField(decode_key(field), os.fsdecode(path), size)
            if (other := fields.setdefault(one.extension, one)) is not one:
                raise UserError(
                    f"{other.path!r} and {one.path!r} would both be field {one.extension!r} of one "
                    f"sample; rename one of them"
                )
        key = decode_key(place)
        if classes:
            if len(fields) > 1:
                raise _NotImageFolderError
            number = numbers[class_of(key) or ""]
            fields[CLASS] = FileField(CLASS, "", len(number), 0, number)
        yield key, list(fields.values())


def _image_classes(root: str, wanted: Wanted) -> tuple[str, ...]:
    """The class folders of what may be an ImageFolder, sorted; empty for anything else, splits among it."""
    classes: set[str] = set()
    for entry in walk(root, wanted, Skipped()):
        folder, slash, name = entry.relative.partition("/")
        if not slash or os.path.splitext(name)[1].lower() not in IMAGES:
            return ()
        classes.add(folder)
        if len(classes) > MAX_CLASSES:
            return ()
    return () if classes <= SPLITS else tuple(sorted(classes))
