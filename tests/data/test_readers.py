"""Every format, in files made by the libraries that define it, becomes the samples that were put in."""

from __future__ import annotations

import bz2
import csv
import datetime
import decimal
import gzip
import io
import json
import lzma
import pickle
import random
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from p2p_dmc.data.formats import scan
from p2p_dmc.data.readers import arrays, base, lines
from p2p_dmc.errors import UserError
from tests.data.helpers import make_tree, take

FIXTURES = Path(__file__).parent / "fixtures"
ROWS = 7  # in each of the fixtures
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def rows(samples: dict[str, dict[str, bytes]]) -> list[Any]:
    """The field json of each, parsed, in the order of the keys."""
    return [json.loads(samples[key]["json"]) for key in sorted(samples)]


def array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


# -- JSONL and CSV ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", COMPRESS)
def test_jsonl(tmp_path: Path, ending: str) -> None:
    said = [{"text": f"Zeile {i} é\n", "n": i} for i in range(2500)]
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in said)
    path = tmp_path / f"texts.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](text.encode()))
    manifest, samples = take(path, tmp_path)
    assert rows(samples) == said
    assert sorted(samples)[:2] == ["000000000", "000000001"]
    assert manifest.fields == ("json",) and manifest.classes == () and len(manifest.shards) > 1


def test_lines_are_carried_as_they_are(tmp_path: Path) -> None:
    """Whatever ends them; blank ones are passed over; the last one needs no end, and a byte order mark is none."""
    path = tmp_path / "odd.ndjson"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  {"b":  [2]}  \n \n"three"\n{"no": "end"}')
    _, samples = take(path, tmp_path)
    assert [samples[key]["json"] for key in sorted(samples)] == [
        *(b'{"a": 1}', b'{"b":  [2]}', b'"three"', b'{"no": "end"}')
    ]
    assert scan(path).skipped.unused == 2


def test_several_files_and_a_read_me(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    make_tree(folder, {"README.md": 10, "LICENSE": 5, ".gitattributes": 4})
    (folder / "part.v1.jsonl").write_text('{"i": 0}\n{"i": 1}\n')
    (folder / "sub").mkdir()
    (folder / "sub/more.jsonl.gz").write_bytes(gzip.compress(b'{"i": 2}\n'))
    manifest, samples = take(folder, tmp_path)
    assert sorted(samples) == ["part_v1-000000000", "part_v1-000000001", "sub/more-000000000"]
    assert rows(samples) == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert manifest.classes == ("sub",)
    assert scan(folder).kind == "JSONL in 2 files"


def test_a_line_without_end_is_no_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_RECORD_BYTES", 1000)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'"' + b"x" * 2000 + b'"')
    with pytest.raises(UserError, match=r"x\.jsonl'.*more than 1000 bytes"):
        scan(path)


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_csv_and_tsv(tmp_path: Path, kind: str, ending: str) -> None:
    said = [
        {"name": f'"x", {i}\ny', "value": str(i), "long": "z" * 200_000 if i == 3 else ""} for i in range(20)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(said[0]), delimiter="," if kind == "csv" else "\t")
    writer.writeheader()
    writer.writerows(said)
    path = tmp_path / f"table.{kind}{ending}"
    path.write_bytes(COMPRESS[ending](text.getvalue().encode()))
    before = csv.field_size_limit()
    assert rows(take(path, tmp_path)[1]) == said
    assert csv.field_size_limit() == before


def test_csv_of_numbers_only_has_no_names(tmp_path: Path) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text("1,2.5\n\n3,4\n")
    assert rows(take(path, tmp_path)[1]) == [{"0": "1", "1": "2.5"}, {"0": "3", "1": "4"}]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a,b\n1,2,3\n", "line 2 has 3 cells and the first one has 2"),
        (b"a,a\n1,2\n", "two columns have one name"),
        (b"a,b\n\xff,2\n", "UTF-8"),
        (b'a,b\n"x"y,2\n', "CSV"),
    ],
)
def test_csv_that_is_none(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(text)
    with pytest.raises(UserError, match=rf"bad\.csv'.*{said}"):
        scan(path)


@pytest.mark.parametrize("ending", [ending for ending in COMPRESS if ending])
def test_compressed_files_that_end_too_early(tmp_path: Path, ending: str) -> None:
    """The first rows of such a file can be read; they must not be taken for all of it."""
    path = tmp_path / f"cut.jsonl{ending}"
    text = b"".join(b'{"i": %d, "x": "%d"}\n' % (i, i * i * 7919) for i in range(20_000))
    path.write_bytes(COMPRESS[ending](text)[:-1000])
    with pytest.raises(UserError, match=r"cut\.jsonl.*not whole.*; if it is still being written seed again"):
        take(path, tmp_path)
    assert list((tmp_path / "store").iterdir()) == []


def test_several_zstandard_frames(tmp_path: Path) -> None:
    path = tmp_path / "frames.jsonl.zst"
    path.write_bytes(COMPRESS[".zst"](b'{"i": 0}\n{"i"') + COMPRESS[".zst"](b": 1}\n"))
    assert rows(take(path, tmp_path)[1]) == [{"i": 0}, {"i": 1}]


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("x.jsonl.zst", "zstandard", "pip install zstandard"),
        ("x.parquet", "pyarrow.parquet", "pip install pyarrow"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, command: str
) -> None:
    (tmp_path / name).write_bytes(b"x")

    def missing(wanted: str) -> None:
        assert wanted == module
        raise ImportError(wanted)

    monkeypatch.setattr(base.importlib, "import_module", missing)
    with pytest.raises(UserError, match=f"run `{command}`"):
        scan(tmp_path / name)


# -- Parquet and save_to_disk -------------------------------------------------------------------------------------


def test_parquet(tmp_path: Path) -> None:
    """Bytes and images are fields of their own; the rest is JSON. More rows than are read at once."""
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    count = 300
    table = pyarrow.table(
        {
            "Image": pyarrow.array([{"bytes": b"img%d" % i, "path": "x"} for i in range(count)], image),
            "raw": pyarrow.array(
                [bytes([i % 256]) if i % 2 else None for i in range(count)], pyarrow.large_binary()
            ),
            "label": list(range(count)),
            "when": [datetime.datetime(2020, 1, 1, 0, 0, i % 60) for i in range(count)],
            "price": [decimal.Decimal("1.50")] * count,
            "list": [[i, None] for i in range(count)],
            "inner": pyarrow.array([[b"\0"]] * count, pyarrow.list_(pyarrow.binary())),
        }
    )
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=100)
    manifest, samples = take(path, tmp_path)
    assert manifest.fields == ("image", "json", "raw")
    assert [samples[f"{i:09d}"]["image"] for i in range(count)] == [b"img%d" % i for i in range(count)]
    assert samples["000000003"]["raw"] == b"\3" and "raw" not in samples["000000002"]
    assert rows(samples)[7] == {
        "label": 7,
        "when": "2020-01-01T00:00:07",
        "price": "1.50",
        "list": [7, None],
        "inner": ["AA=="],
    }


def test_parquet_whose_columns_clash_or_point_outside(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"A": [b"1"], "a": [b"2"]}), path)
    with pytest.raises(UserError, match="two columns would be field 'a'"):
        scan(path)
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    outside = pyarrow.array([{"bytes": None, "path": "/data/1.png"}], image)
    pyarrow.parquet.write_table(pyarrow.table({"image": outside}), path)
    with pytest.raises(UserError, match=r"'image' names files outside, such as '/data/1\.png'"):
        scan(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"bad\.parquet.*not whole, or no Parquet"):
        scan(path)


def saved(i: int) -> dict[str, bytes]:
    said = json.dumps({"text": f"row {i}", "label": i % 2}).encode()
    return {"image": b"\x89PNG%d" % i, "raw": bytes([i]) * i, "json": said}


def test_save_to_disk(tmp_path: Path) -> None:
    manifest, samples = take(FIXTURES / "saved", tmp_path)
    assert [samples[key] for key in sorted(samples)] == [saved(i) for i in range(ROWS)]
    assert manifest.classes == ()


def test_save_to_disk_of_splits(tmp_path: Path) -> None:
    manifest, samples = take(FIXTURES / "saved_splits", tmp_path)
    assert manifest.classes == ("test", "train")
    train = [samples[key] for key in sorted(samples) if key.startswith("train/")]
    assert train == [saved(5), saved(3), saved(1)] and len(samples) == 5


def test_save_to_disk_may_not_lead_outside(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../secret.arrow"}]}))
    with pytest.raises(UserError, match=r"'\.\./secret\.arrow', outside its folder"):
        scan(tmp_path)


# -- MDS ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mds", "mds_zstd"])
def test_mds(tmp_path: Path, name: str) -> None:
    manifest, samples = take(FIXTURES / name, tmp_path)
    assert manifest.fields == ("any.npy", "fixed.npy", "json", "raw", "typed.npy") and len(samples) == ROWS
    for i, key in enumerate(sorted(samples)):
        sample = samples[key]
        assert sample["raw"] == bytes([i]) * i
        assert json.loads(sample["json"]) == {
            "Text": f"Zeile {i} é",
            "number": -i,
            "half": i / 2,
            "more": {"i": [i]},
            "big": 10**30 + i,
        }
        for field, expected in (
            ("any.npy", np.full((2, i + 1), i, dtype=np.uint8)),
            ("typed.npy", np.arange(i + 1, dtype=np.int16)),
            ("fixed.npy", np.full((2, 3), i, dtype=np.float32)),
        ):
            read = array(sample[field])
            assert read.dtype == expected.dtype and read.shape == expected.shape and (read == expected).all()


def mds_index(folder: Path, **changes: Any) -> None:
    said = json.loads((FIXTURES / "mds/index.json").read_text())
    for shard in said["shards"]:
        shard.update(changes)
    folder.mkdir(exist_ok=True)
    (folder / "index.json").write_text(json.dumps(said))
    for path in (FIXTURES / "mds").glob("*.mds"):
        (folder / path.name).write_bytes(path.read_bytes())


def test_mds_that_is_not_taken(tmp_path: Path) -> None:
    encodings = json.loads((FIXTURES / "mds/index.json").read_text())["shards"][0]["column_encodings"]
    pickled = ["pkl" if one == "json" else one for one in encodings]
    for changes, said in (
        ({"column_encodings": pickled}, "'more' is 'pkl': pickle, which runs code"),
        ({"compression": "snappy"}, "compression 'snappy'"),
        ({"raw_data": {"basename": "../x.mds"}}, r"'\.\./x\.mds', outside its folder"),
    ):
        mds_index(tmp_path / "mds", **changes)
        with pytest.raises(UserError, match=said):
            scan(tmp_path / "mds")
    mds_index(tmp_path / "mds")
    shard = tmp_path / "mds/shard.00002.mds"
    shard.write_bytes(shard.read_bytes()[:-3])
    with pytest.raises(UserError, match=r"shard\.00002\.mds'.*ends too early"):
        scan(tmp_path / "mds")


# -- arrays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        np.arange(60, dtype=np.float32).reshape(5, 3, 4),
        np.arange(5, dtype=">i8"),
        np.array([("a", 1), ("bc", 2)], dtype=[("name", "U2"), ("n", "i2")]),
        np.asfortranarray(np.arange(5)),
    ],
)
def test_npy(tmp_path: Path, values: Any) -> None:
    np.save(tmp_path / "rows.npy", values)
    _, samples = take(tmp_path / "rows.npy", tmp_path)
    for i, key in enumerate(sorted(samples)):
        read = array(samples[key]["npy"])
        assert read.dtype == values.dtype and read.shape == values.shape[1:] and (read == values[i]).all()
    assert len(samples) == len(values)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Callable[..., None]) -> None:
    x, y = np.arange(4000, dtype=np.float64).reshape(40, 100), np.arange(40, dtype=np.uint8)
    save(tmp_path / "pairs.npz", X=x, y=y)
    manifest, samples = take(tmp_path / "pairs.npz", tmp_path)
    assert manifest.fields == ("x.npy", "y.npy") and len(samples) == 40
    for i, key in enumerate(sorted(samples)):
        assert (array(samples[key]["x.npy"]) == x[i]).all() and array(samples[key]["y.npy"]) == i


def test_arrays_that_have_no_rows_of_samples(tmp_path: Path) -> None:
    for values, said in (
        (np.array([{}, None]), "array of Python objects is pickled"),
        (np.array(3), "without axes"),
        (np.asfortranarray(np.ones((2, 3))), "column by column"),
        (np.ones((0, 3)), "without a sample"),
    ):
        np.save(tmp_path / "bad.npy", values, allow_pickle=True)
        np.savez(tmp_path / "bad.npz", values)
        for name in ("bad.npy", "bad.npz"):
            with pytest.raises(UserError, match=rf"{name}.*{said}"):
                scan(tmp_path / name)
    np.savez(tmp_path / "bad.npz", x=np.ones(3), y=np.ones(2))
    with pytest.raises(UserError, match="arrays of 2 and of 3 rows"):
        scan(tmp_path / "bad.npz")
    np.save(tmp_path / "cut.npy", np.ones(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-1])
    with pytest.raises(UserError, match="shorter than its header"):
        scan(tmp_path / "cut.npy")


# -- tokens -------------------------------------------------------------------------------------------------------

TOKENS = np.arange(1000, dtype=np.uint16)
STARTS = [0, 10, 10, 400]


def documents(samples: dict[str, dict[str, bytes]]) -> list[list[int]]:
    read = [array(samples[key]["npy"]) for key in sorted(samples)]
    assert all(one.dtype == np.uint16 for one in read)
    return [one.tolist() for one in read]


@pytest.mark.parametrize("said", ["list", "file", "ends", "block"])
def test_tokens_with_a_description(tmp_path: Path, said: str) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    (folder / "train.bin").write_bytes(TOKENS.tobytes())
    np.save(folder / "train.npy", STARTS)
    about = {
        "list": {"documents": STARTS},
        "file": {"documents": "train.npy"},
        "ends": {"documents": [*STARTS, 1000]},
        "block": {"block": 300},
    }[said]
    (folder / "train.json").write_text(json.dumps({"dtype": "uint16", **about}))
    starts = [0, 300, 600, 900] if said == "block" else STARTS
    expected = [TOKENS[a:b].tolist() for a, b in zip(starts, [*starts[1:], 1000], strict=True)]
    for path in (folder, folder / "train.bin"):
        (tmp_path / path.name).mkdir(exist_ok=True)
        assert documents(take(path, tmp_path / path.name)[1]) == expected


def megatron(path: Path, sizes: list[int], firsts: list[int], code: int = 8) -> None:
    """Megatron-LM's layout: sequences' sizes and places, and which of them begin documents."""
    places = np.cumsum([0, *sizes[:-1]]) * 2
    path.write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(firsts))
        + np.array(sizes, "<i4").tobytes()
        + places.astype("<i8").tobytes()
        + np.array(firsts, "<i8").tobytes()
    )


def test_megatrons_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(TOKENS.tobytes())
    megatron(tmp_path / "t.idx", [10, 390, 600], [0, 1, 3])
    _, samples = take(tmp_path / "t.bin", tmp_path)
    assert documents(samples) == [TOKENS[:10].tolist(), TOKENS[10:].tolist()]


@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
def test_documents_are_read_some_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Empty ones and empty sequences among them, wherever a piece ends."""
    monkeypatch.setattr(arrays, "ROWS_AT_ONCE", at_once)
    rng = random.Random(5)
    for number in range(8):
        sizes = [rng.choice([0, 1, 30]) for _ in range(rng.randrange(30))]
        sizes.append(1000 - sum(sizes))
        firsts = sorted(rng.choices(range(len(sizes) + 1), k=rng.randrange(12)))
        firsts = [0, *firsts, len(sizes)]
        ends = [0, *np.cumsum(sizes).tolist()]
        bounds = [ends[first] for first in firsts]
        expected = [TOKENS[a:b].tolist() for a, b in pairwise(bounds)]
        folder = tmp_path / str(number)
        for kind in ("megatron", "list"):
            one = folder / kind
            one.mkdir(parents=True)
            (one / "t.bin").write_bytes(TOKENS.tobytes())
            if kind == "megatron":
                megatron(one / "t.idx", sizes, firsts)
            else:
                (one / "t.json").write_text(json.dumps({"dtype": "uint16", "documents": bounds}))
            found = scan(one / "t.bin")
            starts = [sample.fields[0].offset // 2 for sample in found.samples]
            assert starts == bounds[:-1] and len(found.samples) == len(expected)
            assert documents(take(one / "t.bin", one)[1]) == expected


def test_megatrons_index_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(TOKENS.tobytes())
    for sizes, firsts, said in (
        ([10, 990], [0, 1, 3], "names sequences that it does not have"),
        ([10, 990], [1, 0, 2], "do not follow"),
        ([10, -5, 995], [0, 3], "do not follow"),
    ):
        megatron(tmp_path / "t.idx", sizes, firsts)
        with pytest.raises(UserError, match=said):
            scan(path)


def test_a_long_list_of_documents_has_to_be_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "MAX_DESCRIPTION_BYTES", 500)
    (tmp_path / "t.bin").write_bytes(TOKENS.tobytes())
    (tmp_path / "t.json").write_text(json.dumps({"dtype": "uint16", "documents": list(range(1000))}))
    with pytest.raises(UserError, match=r"t\.json': more than 500 bytes; save the documents as a \.npy"):
        scan(tmp_path / "t.bin")


def test_tokens_that_do_not_fit_their_index(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    path.write_bytes(TOKENS.tobytes())
    megatron(tmp_path / "t.idx", [10, 991], [0, 1, 2])
    with pytest.raises(UserError, match="shorter than its index"):
        scan(path)
    megatron(tmp_path / "t.idx", [10, 990], [0, 1, 2], code=99)
    with pytest.raises(UserError, match="type 99"):
        scan(path)
    (tmp_path / "t.idx").unlink()
    for about, said in (
        ({"dtype": "object", "block": 1}, "dtype 'object'"),
        ({"dtype": "uint16", "block": 0}, "block of 0"),
        ({"dtype": "uint16", "documents": [0, 1001]}, "do not ascend"),
        ({"dtype": "uint16", "documents": [5]}, "do not ascend"),
        ({"dtype": "uint16"}, "block"),
    ):
        (tmp_path / "t.json").write_text(json.dumps(about))
        with pytest.raises(UserError, match=said):
            scan(path)
    (tmp_path / "t.json").unlink()
    assert scan(path).kind == "one file"


# -- pickle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.pkl", "x.pickle", "x.pt", "x.PTH", "x.joblib"])
def test_pickle_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / name).write_bytes(pickle.dumps({}))
    (tmp_path / "ok.txt").write_text("x")
    for path in (tmp_path, tmp_path / "deep" / name):
        with pytest.raises(UserError, match=f"{name}': pickle is not taken.*--exclude"):
            scan(path)
    assert len(scan(tmp_path, exclude=["*.p*", "*.P*", "*.joblib"]).samples) == 1
