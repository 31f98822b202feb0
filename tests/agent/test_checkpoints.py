"""Checkpoints on disk: whole or absent whatever kills the writer, found out when damaged, and only so many."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from p2p_dmc.agent.checkpoints import (
    checkpoint_parameters,
    list_checkpoints,
    load_checkpoint,
    meta_digest,
    model_digest,
    unfinished_checkpoints,
    verify_checkpoint,
    write_checkpoint,
    write_model,
)
from p2p_dmc.agent.home import MemoryFolder
from p2p_dmc.agent.state import Held, SlotPool, file_digest
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.wire.trainer_messages import ParameterSpec
from tests.agent.helpers import DATASET, NUMEL, PARAMETERS, fill, state, surroundings

HISTORY = b"h" * 16


@pytest.fixture
def memory(tmp_path: Path) -> MemoryFolder:
    return surroundings(tmp_path).services.memory


@pytest.fixture
def slots(memory: MemoryFolder) -> SlotPool:
    return SlotPool(memory, NUMEL)


@pytest.fixture
def held(slots: SlotPool) -> Held:
    ledger = Ledger.start(DATASET, [10, 4], 1, 2).advance([Stretch(shard=0, lo=0, hi=3)])
    return state(slots, (3, 7), 1.5, ledger)


def write(folder: Path, held: Held, *, keep: int = 3, closed: bool = False) -> Path:
    return write_checkpoint(folder, held, PARAMETERS, HISTORY, closed, keep)


def at(held: Held, view_epoch: int, number: int) -> Held:
    return replace(held, ref=replace(held.ref, lineage=(view_epoch, number)))


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def lineages(folder: Path) -> list[tuple[int, int]]:
    return [c.lineage for c in list_checkpoints(folder)]


def test_what_lies_there(tmp_path: Path, held: Held) -> None:
    """The layout that other programs rely on."""
    path = write(tmp_path, held, closed=True)
    assert path == tmp_path / "checkpoints" / "3-7"
    assert {p.name for p in path.iterdir()} == {
        "model.safetensors", "outer.safetensors", "ledger.msgpack", "meta.json",
    }  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    assert (
        tensors["weight"].tolist() == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]] and tensors["bias"].tolist() == 7.5
    )
    assert {str(t.dtype) for t in tensors.values()} == {"float32"} and load_file(
        path / "outer.safetensors"
    ) == {}
    assert Ledger.from_bytes((path / "ledger.msgpack").read_bytes()) == held.ledger
    meta = json.loads((path / "meta.json").read_text())
    assert (meta["lineage"], meta["closed"], meta["history"]) == ([3, 7], True, HISTORY.hex())
    assert meta["digest"] == held.ref.digest.hex()


def test_there_and_back(tmp_path: Path, held: Held, slots: SlotPool) -> None:
    write(tmp_path, held)
    (found,) = list_checkpoints(tmp_path)
    assert found.lineage == (3, 7) and checkpoint_parameters(found) == PARAMETERS
    loaded = load_checkpoint(found, slots)
    assert loaded.slot != held.slot and replace(loaded, slot=held.slot) == held
    assert loaded.slot.read_bytes() == held.slot.read_bytes()
    assert +slots._pins == Counter({held.slot: 1, loaded.slot: 1})


def test_the_outer_momentum_lies_beside_the_model(
    tmp_path: Path, memory: MemoryFolder, slots: SlotPool
) -> None:
    both = SlotPool(memory, 2 * NUMEL)
    held = state(both, (3, 7), 1.5)
    path = write(tmp_path, held)
    model, outer = (load_file(path / name) for name in ("model.safetensors", "outer.safetensors"))
    assert model["weight"].tolist() == [[1.5, 2.5, 3.5], [4.5, 5.5, 6.5]] and model["bias"].tolist() == 7.5
    assert (
        outer["weight"].tolist() == [[8.5, 9.5, 10.5], [11.5, 12.5, 13.5]] and outer["bias"].tolist() == 14.5
    )
    (found,) = list_checkpoints(tmp_path)
    loaded = load_checkpoint(found, both)
    assert replace(loaded, slot=held.slot) == held and loaded.slot.read_bytes() == held.slot.read_bytes()
    assert verify_checkpoint(found) == held.ledger
    with pytest.raises(ValueError, match="could not broadcast"):
        load_checkpoint(found, slots)
    assert model_digest(held, PARAMETERS) == state(slots, (1, 1), 1.5).anchor_digest


def test_newest_first_by_number_not_by_name(tmp_path: Path, held: Held) -> None:
    for lineage in ((9, 2), (10, 1), (9, 10), (2, 99)):
        write(tmp_path, at(held, *lineage), keep=9)
    assert lineages(tmp_path) == [(10, 1), (9, 10), (9, 2), (2, 99)]
    assert list_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_so_many_are_kept(tmp_path: Path, held: Held, keep: int) -> None:
    for i in range(1, 8):
        write(tmp_path, at(held, 1, i), keep=keep)
        assert lineages(tmp_path) == [(1, j) for j in range(i, max(0, i - keep), -1)]
    write(tmp_path, at(held, 0, 5), keep=keep)  # older than all, and just written
    assert (0, 5) in lineages(tmp_path) and len(lineages(tmp_path)) == keep


def test_the_same_state_again_replaces_the_first(tmp_path: Path, held: Held, slots: SlotPool) -> None:
    write(tmp_path, held)
    write(tmp_path, held, closed=True)
    (found,) = list_checkpoints(tmp_path)
    assert found.meta["closed"] is True and load_checkpoint(found, slots).ref == held.ref
    assert names(tmp_path) == {"3-7"}


# -- damage -----------------------------------------------------------------------------------------------------------


def change_meta(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """With care: its digest fits."""
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    (path / "meta.json").write_text(json.dumps(meta | {"meta_digest": meta_digest(meta)}))


def with_digest(path: Path, name: str) -> None:
    """The damage is done with care: the file's digest fits."""
    change_meta(path, lambda m: m["files"].update({name: file_digest(path / name).hex()}))  # type: ignore[attr-defined]


def flip(name: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[len(data) // 2] ^= 4
        (path / name).write_bytes(data)

    return run


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:-1]) and None


def flip_with_care(path: Path) -> None:
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 4
    (path / "model.safetensors").write_bytes(data)
    with_digest(path, "model.safetensors")


def tensors_with_care(tensors: dict[str, object]) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        found = load_file(path / "model.safetensors")
        save_file({name: found[str(of)] for name, of in tensors.items()}, path / "model.safetensors")
        with_digest(path, "model.safetensors")

    return run


def junk_with_care(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"junk")
    with_digest(path, "model.safetensors")


def another_ledger(path: Path) -> None:
    (path / "ledger.msgpack").write_bytes(Ledger.start(DATASET, [10, 4], 1, 2).to_bytes())
    with_digest(path, "ledger.msgpack")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the model": flip("model.safetensors"),
    "a bit of the ledger": flip("ledger.msgpack"),
    "a bit of the outer state": flip("outer.safetensors"),
    "the model cut": cut("model.safetensors"),
    "the ledger cut": cut("ledger.msgpack"),
    "the model gone": lambda path: (path / "model.safetensors").unlink(),
    "the ledger gone": lambda path: (path / "ledger.msgpack").unlink(),
    "a bit of the model, its digest fits": flip_with_care,
    "a tensor gone, its digest fits": tensors_with_care({"weight": "weight"}),
    "a tensor of another shape, its digest fits": tensors_with_care({"weight": "bias", "bias": "bias"}),
    "a larger tensor, its digest fits": tensors_with_care({"weight": "weight", "bias": "weight"}),
    "junk, its digest fits": junk_with_care,
    "another ledger, its digest fits": another_ledger,
    "another tau": lambda path: change_meta(path, lambda m: m.update(tau="00")),
    "tau that is no hexadecimal": lambda path: change_meta(path, lambda m: m.update(tau="zz")),
    "tau that is no text": lambda path: change_meta(path, lambda m: m.update(tau=3)),
    "no digest": lambda path: change_meta(path, lambda m: m.pop("digest")),
    "no files": lambda path: change_meta(path, lambda m: m.pop("files")),
    "files that are none": lambda path: change_meta(path, lambda m: m.update(files=[1])),
    "no parameters": lambda path: change_meta(path, lambda m: m.pop("parameters")),
    "parameters that are none": lambda path: change_meta(path, lambda m: m.update(parameters=[7])),
    "fewer parameters": lambda path: change_meta(path, lambda m: m["parameters"].pop()),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_costs_no_slot(tmp_path: Path, held: Held, slots: SlotPool, damage: str) -> None:
    path = write(tmp_path, held)
    DAMAGES[damage](path)
    (found,) = list_checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"\w"):
        load_checkpoint(found, slots)
    assert +slots._pins == Counter({held.slot: 1})
    with pytest.raises(ValueError, match=r"\w"):
        verify_checkpoint(found)


FILES = ["model.safetensors", "outer.safetensors", "ledger.msgpack", "meta.json"]


def problem(folder: Path) -> str:
    """What is said of the only checkpoint there; "" when it is whole."""
    (found,) = list_checkpoints(folder)
    try:
        verify_checkpoint(found)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FILES)
def test_any_byte_of_any_file(tmp_path: Path, held: Held, name: str) -> None:
    """Changed, or the file cut before it: found out, and the file is named."""
    path = write(tmp_path, held) / name
    whole = path.read_bytes()
    assert problem(tmp_path) == ""
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 4]) + whole[i + 1 :])
        assert problem(tmp_path) == f"{name} is damaged", f"byte {i} of {len(whole)}"
        path.write_bytes(whole[:i])
        assert problem(tmp_path) == f"{name} is damaged", f"cut to {i} of {len(whole)}"
    path.write_bytes(whole + b"x")
    assert problem(tmp_path) == f"{name} is damaged"
    path.unlink()
    assert problem(tmp_path) == f"{name} is missing"
    path.write_bytes(whole)
    assert problem(tmp_path) == ""


def test_a_whole_checkpoint_tells_its_ledger(tmp_path: Path, held: Held) -> None:
    write(tmp_path, held)
    (found,) = list_checkpoints(tmp_path)
    assert verify_checkpoint(found) == held.ledger


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"lineage": 3}', '{"lineage": [1]}', "[" * 100_000]
)
def test_a_meta_that_says_nothing(tmp_path: Path, held: Held, slots: SlotPool, text: str) -> None:
    write(tmp_path, held)
    (write(tmp_path, at(held, 4, 1)) / "meta.json").write_text(text)
    damaged, whole = list_checkpoints(tmp_path)
    assert (damaged.lineage, damaged.problem) == ((4, 1), "meta.json is damaged")
    with pytest.raises(ValueError, match=r"^meta.json is damaged$"):
        load_checkpoint(damaged, slots)
    assert (whole.lineage, whole.problem) == ((3, 7), "")


def test_a_folder_with_another_name(tmp_path: Path, held: Held) -> None:
    path = write(tmp_path, held)
    path.rename(path.with_name("3-8"))
    assert problem(tmp_path) == "it is of [3, 7], and its folder has another name"
    path.with_name("3-8").rename(path.with_name("a copy of 3-7"))
    assert list_checkpoints(tmp_path) == []


def test_damaged_ones_take_no_place_of_whole_ones(tmp_path: Path, held: Held) -> None:
    for i in range(1, 5):
        write(tmp_path, at(held, 1, i), keep=3)
        if i in (2, 3):
            (tmp_path / "checkpoints" / f"1-{i}" / "meta.json").unlink()
    assert lineages(tmp_path) == [(1, 4), (1, 3), (1, 2), (1, 1)]
    write(tmp_path, at(held, 1, 5), keep=3)
    write(tmp_path, at(held, 1, 6), keep=3)
    assert lineages(tmp_path) == [(1, 6), (1, 5), (1, 4)], "older than all that are kept"


def test_what_was_given_up_goes_with_the_first_one_of_the_new_history(tmp_path: Path, held: Held) -> None:
    """A newer number says nothing then; what is older of another history may be where the new one began."""
    for i in (1, 7, 8, 9):
        write(tmp_path, at(held, 2, i), keep=9)
    write_checkpoint(tmp_path, at(held, 2, 8), PARAMETERS, b"n" * 16, False, 2)
    assert lineages(tmp_path) == [(2, 8), (2, 7)]


# -- crashes ----------------------------------------------------------------------------------------------------------

CRASH = """
import os, shutil, signal, sys
from pathlib import Path
from p2p_dmc.agent import checkpoints, home
from tests.agent.helpers import PARAMETERS, state, surroundings
from p2p_dmc.agent.state import SlotPool

root, point, value = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

memory = surroundings(root / "killed").services.memory
held = state(SlotPool(memory, 7), (5, 1), value)
replace = os.replace
if point == "tensors":
    checkpoints.save_file = die
elif point == "synced":
    checkpoints._sync_file = die
elif point == "meta":
    checkpoints.write_json = die
elif point == "rename":
    os.replace = lambda a, b: die() if Path(b).name == "5-1" else replace(a, b)
elif point == "old aside":
    os.replace = lambda a, b: die() if Path(a).name == "5-1" else replace(a, b)
elif point == "between":
    os.replace = lambda a, b: die() if Path(a).name == ".5-1.new.tmp" else replace(a, b)
elif point == "renamed":
    checkpoints.sync_folder = lambda p: die() if Path(p).name == "checkpoints" else None
elif point == "pruning":
    rmtree = shutil.rmtree
    def half(path, **kwargs):
        if Path(path).name.endswith(".gone.tmp"):
            (Path(path) / "model.safetensors").unlink()
            die()
        rmtree(path, **kwargs)
    shutil.rmtree = half
checkpoints.write_checkpoint(root, held, PARAMETERS, b"h" * 16, False, 2)
"""
POINTS = ["tensors", "synced", "meta", "rename", "renamed", "pruning"]


def crash(root: Path, point: str, value: float = 9.0) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(root), point, str(value)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_while_writing_leaves_the_old_ones_and_nothing_half(
    tmp_path: Path, held: Held, slots: SlotPool, memory: MemoryFolder, point: str
) -> None:
    for i in (1, 2):
        write(tmp_path, at(held, 4, i))
    assert crash(tmp_path, point) == -signal.SIGKILL
    whole = [load_checkpoint(found, slots).ref.lineage for found in list_checkpoints(tmp_path)]
    assert whole[-1:] == [(4, 2)] if point == "pruning" else whole[-2:] == [(4, 2), (4, 1)]
    assert ((5, 1) in whole) == (point in ("renamed", "pruning"))
    half = [path.name for path in unfinished_checkpoints(tmp_path)]
    assert half == ([] if (5, 1) in whole else [".5-1.new.tmp"])
    write(tmp_path, at(held, 6, 1), keep=2)  # the next life cleans up
    assert all(not name.startswith(".") for name in names(tmp_path))
    assert lineages(tmp_path)[0] == (6, 1)


@pytest.mark.parametrize("point", ["tensors", "meta", "old aside", "between"])
def test_a_kill_while_replacing_leaves_the_old_one(
    tmp_path: Path, held: Held, slots: SlotPool, point: str
) -> None:
    write(tmp_path, at(held, 5, 1))
    assert crash(tmp_path, point) == -signal.SIGKILL
    (found,) = list_checkpoints(tmp_path)
    assert load_checkpoint(found, slots).anchor_digest == held.anchor_digest
    assert (tmp_path / "checkpoints" / "5-1").exists() == (point != "between")
    write(tmp_path, at(held, 6, 1))
    assert lineages(tmp_path) == [(6, 1), (5, 1)] and names(tmp_path) == {"6-1", "5-1"}


def test_the_writer_that_is_not_killed(tmp_path: Path, slots: SlotPool) -> None:
    """So that the kills above are what made the difference."""
    assert crash(tmp_path, "nowhere") == 0
    (found,) = list_checkpoints(tmp_path)
    loaded = load_checkpoint(found, slots)
    assert loaded.ref.lineage == (5, 1) and loaded.anchor_digest == fill(slots.take(), 9.0)


def test_a_model_is_written_whole_or_not_at_all(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "final" / "model.safetensors"
    write_model(path, held.slot, PARAMETERS, {"format": "pt"})
    before = path.read_bytes()

    def broken(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("p2p_dmc.agent.checkpoints._sync_file", broken)
    fill(held.slot, 4.0)
    with pytest.raises(OSError, match="Input/output"):
        write_model(path, held.slot, PARAMETERS, {"format": "pt"})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]
    scalar = (ParameterSpec(name="only", shape=(7,), dtype="float32"),)
    monkeypatch.undo()
    write_model(path, held.slot, scalar, {})
    assert load_file(path)["only"].tolist() == [4, 5, 6, 7, 8, 9, 10]
