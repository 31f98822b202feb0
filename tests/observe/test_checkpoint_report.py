"""`dmc-peer checkpoint` on homes without an agent: what it lists, what it finds damaged, and its exit code."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from p2p_dmc.agent.checkpoints import write_checkpoint
from p2p_dmc.agent.state import SlotPool
from p2p_dmc.cli import main
from p2p_dmc.core.ledger import Ledger, Stretch
from tests.agent.helpers import DATASET, NUMEL, PARAMETERS, state, surroundings

FILES = ["model.safetensors", "outer.safetensors", "ledger.msgpack", "meta.json"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs: "train" with two checkpoints, at the last of which it was stopped, and "other" with one."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command has its own, for its process
    root = tmp_path / "home"
    slots = SlotPool(surroundings(tmp_path / "elsewhere").services.memory, NUMEL)
    ledger = Ledger.start(DATASET, [10, 4], 1, 2).advance([Stretch(shard=0, lo=0, hi=3)])
    held = state(slots, (3, 7), 1.5, ledger)
    for run, round_number, closed in (("train", 7, False), ("train", 8, True), ("other", 1, False)):
        one = replace(held, ref=replace(held.ref, lineage=(3, round_number)))
        write_checkpoint(root / "runs" / run, one, PARAMETERS, b"h" * 16, closed, 3)
    return root


def call(home: Path, *words: str) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *words, "--home", str(home)])


def facts(home: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = call(home, *words, "--json")
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def states(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(r["run"], Path(c["path"]).name, c["state"]) for r in found["runs"] for c in r["checkpoints"]]


def folder(home: Path) -> Path:
    return home / "runs" / "train" / "checkpoints"


def test_listed_and_verified(home: Path) -> None:
    assert states(facts(home)) == [
        ("other", "3-1", "listed"), ("train", "3-8", "listed"), ("train", "3-7", "listed"),
    ]  # fmt: skip
    found = facts(home, "verify", "--run", "train")
    assert states(found) == [("train", "3-8", "whole"), ("train", "3-7", "whole")]
    newest = found["runs"][0]["checkpoints"][0]
    on_disk = sum(f.stat().st_size for f in (folder(home) / "3-8").iterdir())
    assert (newest["view_epoch"], newest["round"], newest["closed"]) == (3, 8, True)
    assert (newest["epoch"], newest["epochs"], newest["samples_total"]) == (0, 2, 3)
    assert newest["size_bytes"] == on_disk and newest["problem"] == ""
    text = call(home, "verify").stdout
    assert "3 checkpoints whole, 0 damaged\n" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("train")]
    assert [row[:7] for row in rows] == [
        ["train", "3", "8", "1", "of", "2", "3"], ["train", "3", "7", "1", "of", "2", "3"],
    ]  # fmt: skip
    assert rows[0][-3:] == ["whole,", "stopped", "here"] and rows[1][-1] == "whole"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0, 0.3, 0.7, -1])
def test_a_changed_byte(home: Path, name: str, where: float) -> None:
    path = folder(home) / "3-8" / name
    data = bytearray(path.read_bytes())
    data[int(where * len(data)) if where >= 0 else -1] ^= 1
    path.write_bytes(data)
    see_damage(home, f"{name} is damaged")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0, 0.5])
def test_a_file_that_is_cut(home: Path, name: str, part: float) -> None:
    path = folder(home) / "3-8" / name
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    see_damage(home, f"{name} is damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing(home: Path, name: str) -> None:
    (folder(home) / "3-8" / name).unlink()
    see_damage(home, f"{name} is missing")


def see_damage(home: Path, problem: str) -> None:
    """Exactly the newest checkpoint of "train" is damaged, and both answers say so."""
    found = facts(home, "verify", code=1)
    assert states(found) == [
        ("other", "3-1", "whole"),
        ("train", "3-8", "damaged"),
        ("train", "3-7", "whole"),
    ]
    assert found["runs"][1]["checkpoints"][0]["problem"] == problem
    done = call(home, "verify")
    assert done.exit_code == 1
    assert f"run train: {folder(home) / '3-8'} is damaged: {problem}\n" in done.stdout
    assert done.stdout.endswith("2 checkpoints whole, 1 damaged\n")
    assert call(home, "verify", "--run", "other").exit_code == 0


def test_what_a_killed_writer_left(home: Path) -> None:
    """Not damage: nobody reads it, and the next checkpoint removes it."""
    half = folder(home) / ".3-9.new.tmp"
    shutil.copytree(folder(home) / "3-8", half)
    (half / "meta.json").unlink()
    found = facts(home, "verify")
    assert states(found)[-1] == ("train", ".3-9.new.tmp", "unfinished")
    assert f"run train: {half} is unfinished: its writing did not come to its end" in call(home).stdout


def test_one_that_was_moved_aside_for_a_successor_that_never_came(home: Path) -> None:
    (folder(home) / "3-8").rename(folder(home) / ".3-8.old.tmp")
    found = facts(home, "verify", "--run", "train")
    assert states(found) == [("train", ".3-8.old.tmp", "whole"), ("train", "3-7", "whole")]


def test_nothing_there(tmp_path: Path, home: Path) -> None:
    done = call(home, "verify", "--run", "nonsense")
    assert (done.exit_code, done.stderr) == (
        1,
        f"dmc-peer: no run 'nonsense' in {home}: it has other, train\n",
    )
    done = call(tmp_path / "nowhere")
    assert (done.exit_code, done.stderr) == (
        1, f"dmc-peer: {tmp_path / 'nowhere'} is no home of a peer; give its --home\n",
    )  # fmt: skip
    (tmp_path / "empty").mkdir()
    assert call(tmp_path / "empty").stdout == f"no checkpoint in {tmp_path / 'empty'}\n"
    assert call(tmp_path / "empty", "verify").exit_code == 0
    assert call(home, "frobnicate").exit_code == 2
