"""`dmc-peer export`: what it writes is what torch and safetensors load, and what it refuses is one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

from p2p_dmc.agent import export, run_files
from p2p_dmc.agent.checkpoints import write_checkpoint, write_model
from p2p_dmc.agent.state import Held, SlotPool, file_digest, state_digest
from p2p_dmc.cli import main
from p2p_dmc.core import adacomm
from p2p_dmc.core.agreement_messages import Promises, Replaced, StateRef
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.train import inner_state
from p2p_dmc.train.state import FlatParameters, open_slot
from p2p_dmc.wire.trainer_messages import RunReady
from tests.agent.helpers import DATASET, POLICY, surroundings

HISTORY = b"h" * 16


class Mixed(torch.nn.Module):
    """Two dtypes and a scalar."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.half = torch.nn.Linear(3, 4).to(torch.bfloat16)
        self.whole = torch.nn.Linear(4, 2)
        self.scale = torch.nn.Parameter(torch.rand(()))


class Peer:
    """A home in which a run has trained, without any process."""

    def __init__(self, root: Path, run: str = "train") -> None:
        self.around = surroundings(root)
        self.home = root / "home1"
        self.folder = self.home / "runs" / run
        self.model = Mixed()
        self.flat = FlatParameters(list(self.model.named_parameters()))
        self.slots = SlotPool(self.around.services.memory, self.flat.size)
        self.folder.mkdir(parents=True)

    def held(self, lineage: tuple[int, int], seed: int) -> Held:
        """A committed state; the model's parameters are those of it."""
        self.model.load_state_dict(Mixed(seed).state_dict())
        slot = self.slots.take()
        self.flat.gather(open_slot(str(slot), self.flat.size))
        ledger, tau, anchor = (
            Ledger.start(DATASET, [10, 4], 1, 2),
            adacomm.start(POLICY),
            file_digest(slot),
        )
        ref = StateRef(lineage=lineage, digest=state_digest(anchor, ledger, tau))
        return Held(ref=ref, slot=slot, anchor_digest=anchor, ledger=ledger, tau=tau)

    def checkpoint(self, lineage: tuple[int, int], seed: int = 1) -> Path:
        held = self.held(lineage, seed)
        return write_checkpoint(self.folder, held, self.flat.specs, HISTORY, False, 3)

    def finish(self, lineage: tuple[int, int] = (3, 9), seed: int = 2) -> None:
        """As the end of a run does it."""
        held = self.held(lineage, seed)
        ready = RunReady(
            dataset=DATASET,
            seed=1,
            epochs=2,
            batch_size=4,
            parameters=self.flat.specs,
            tau_policy=POLICY.to_bytes(),
            outer="average",
        )
        pairs = run_files.fingerprint(ready, "tiny", "majority", "gloo", "wait")
        run_files.save_run(self.folder, fingerprint=pairs)
        path = self.folder / "final" / "model.safetensors"
        write_model(path, held.slot, self.flat.specs, {"format": "pt"})
        finished = {"lineage": list(lineage), "digest": held.anchor_digest.hex()}
        run_files.save_run(self.folder, finished=finished)

    def keep_inner(self, history: bytes = HISTORY) -> torch.optim.Optimizer:
        """Two steps of Adam, kept as the trainer keeps it."""
        inner = torch.optim.Adam(self.model.parameters(), lr=0.25, betas=(0.5, 0.75))
        began = inner_state.group_options(inner)
        steps(self.model, inner, 2)
        named = list(self.model.named_parameters())
        inner_state.write(self.folder, inner_state.take(inner, named, began, history.hex(), (3, 8), 1))
        return inner

    def export(self, *words: str | Path) -> Result:
        return CliRunner().invoke(main, ["export", "--home", str(self.home), *map(str, words)])

    def facts(self, *words: str | Path) -> dict[str, Any]:
        result = self.export("--json", *words)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    def refused(self, *words: str | Path) -> str:
        """The one line of an export that wrote nothing."""
        before = sorted(self.home.parent.rglob("*"))
        result = self.export(*words)
        assert result.exit_code == 1 and result.stdout == ""
        assert sorted(self.home.parent.rglob("*")) == before, "something was written"
        *notes, line = result.stderr.splitlines()
        assert all("skipped" in note or "a checkpoint is taken" in note for note in notes)
        return line


def steps(model: torch.nn.Module, inner: torch.optim.Optimizer, count: int) -> None:
    for number in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, number + 1)
        inner.step()


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = (
        safetensors.torch.load_file(path)
        if path.suffix == ".safetensors"
        else torch.load(path, weights_only=True)
    )
    return found


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(tmp_path)


# -- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_final_model_is_the_models_own_bit_for_bit(peer: Peer, tmp_path: Path, ending: str) -> None:
    peer.checkpoint((3, 9))
    peer.finish()
    out = tmp_path / f"model{ending}"
    facts = peer.facts(out)
    found = load(out)
    again = Mixed(7)
    again.load_state_dict(found)
    for (name, one), two in zip(peer.model.named_parameters(), again.parameters(), strict=True):
        assert found[name].dtype == one.dtype
        assert torch.equal(one, two)
    assert facts == {
        "run": "train",
        "from": "final",
        "lineage": [3, 9],
        "out": str(out),
        "format": "torch" if ending == ".pt" else "safetensors",
        "parameters": 5,
        "values": 27,
        "dtypes": ["bfloat16", "float32"],
        "size_bytes": out.stat().st_size,
        "optimizer": None,
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["home1", out.name])


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_float32_is_what_the_peers_average(peer: Peer, tmp_path: Path, ending: str) -> None:
    checkpoint = peer.checkpoint((3, 9))
    out = tmp_path / f"model{ending}"
    assert peer.facts("--fp32", out)["dtypes"] == ["float32"]
    anchor = safetensors.torch.load_file(checkpoint / "model.safetensors")
    found = load(out)
    assert found.keys() == anchor.keys()
    assert all(torch.equal(found[name], anchor[name]) for name in anchor)


def test_a_file_for_torch_has_nothing_but_the_model(peer: Peer, tmp_path: Path) -> None:
    peer.finish()
    peer.facts(tmp_path / "model.pt")
    torch.save(peer.model.state_dict(), tmp_path / "own.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1.2 * (tmp_path / "own.pt").stat().st_size
    assert list(load(tmp_path / "model.pt")) == list(peer.model.state_dict())


def test_the_optimizers_state_goes_on_where_the_trainer_was(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    inner = peer.keep_inner()
    facts = peer.facts("--with-optimizer", tmp_path / "model.pt")
    assert facts["optimizer"] == {
        "class": "torch.optim.adam.Adam",
        "lineage": [3, 8],
        "ahead": 1,
        "out": str(tmp_path / "model.optimizer.pt"),
        "size_bytes": (tmp_path / "model.optimizer.pt").stat().st_size,
    }
    again = Mixed()
    again.load_state_dict(peer.model.state_dict())
    loaded = torch.optim.Adam(again.parameters())
    loaded.load_state_dict(load(tmp_path / "model.optimizer.pt"))
    assert loaded.param_groups[0]["lr"] == 0.25 and loaded.param_groups[0]["betas"] == (0.5, 0.75)
    steps(peer.model, inner, 3)
    steps(again, loaded, 3)
    assert all(torch.equal(*pair) for pair in zip(peer.model.parameters(), again.parameters(), strict=True))


def test_the_optimizers_state_for_safetensors(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    inner = peer.keep_inner()
    peer.facts("--with-optimizer", tmp_path / "model.safetensors")
    path = tmp_path / "model.optimizer.safetensors"
    found = load(path)
    for name, parameter in peer.model.named_parameters():
        for key, value in inner.state[parameter].items():
            assert torch.equal(found[f"{name}/{key}"], value)
    with safetensors.safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()["optimizer"])
    assert said["optimizer"] == "torch.optim.adam.Adam" and said["lineage"] == [3, 8]
    assert said["groups"][0]["options"]["lr"] == 0.25


def test_what_a_person_reads(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    peer.keep_inner()
    result = peer.export("--with-optimizer", tmp_path / "m.pt")
    size = (tmp_path / "m.pt").stat().st_size / 1024
    assert result.stdout.splitlines()[0] == (
        f"{tmp_path / 'm.pt'}: checkpoint of run 'train', view 3 round 9; 5 parameters with 27 values "
        f"(bfloat16, float32), {size:.1f} KiB"
    )
    assert "m.optimizer.pt: this peer's state of Adam, view 3 round 8 and 1 local step; " in result.stdout
    assert result.stderr == ""


# -- which one is meant -------------------------------------------------------------------------------------------


def test_from(peer: Peer, tmp_path: Path) -> None:
    for number in (7, 8, 9):
        peer.checkpoint((3, number), seed=number)
    assert peer.facts(tmp_path / "a.pt")["lineage"] == [3, 9]
    peer.finish((4, 2))
    assert peer.facts(tmp_path / "b.pt")["lineage"] == [4, 2]
    assert peer.facts(tmp_path / "c.pt", "--from", "final")["from"] == "final"
    newest = peer.facts(tmp_path / "d.pt", "--from", "checkpoint")
    assert (newest["from"], newest["lineage"]) == ("checkpoint", [3, 9])
    for number, word in ((7, "3-7"), (8, "3.8")):
        assert peer.facts(tmp_path / f"{word}.pt", "--from", word)["lineage"] == [3, number]
        found = load(tmp_path / f"{word}.pt")
        assert torch.equal(found["scale"], Mixed(number).scale)


def test_a_damaged_checkpoint_is_passed_over_with_a_line(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 8), seed=8)
    damage(peer.checkpoint((3, 9), seed=9) / "model.safetensors")
    result = peer.export("--json", tmp_path / "m.pt")
    assert json.loads(result.stdout)["lineage"] == [3, 8]
    assert "3-9 is skipped: model.safetensors is damaged" in result.stderr
    assert torch.equal(load(tmp_path / "m.pt")["scale"], Mixed(8).scale)
    line = peer.refused(tmp_path / "n.pt", "--from", "3-9")
    assert "has no whole checkpoint 3-9 here" in line


def test_a_damaged_final_model_is_not_taken(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    peer.finish()
    path = peer.folder / "final" / "model.safetensors"
    for spoil, words in ((damage, "is damaged"), (shorten, "is damaged"), (Path.unlink, "is missing")):
        whole = path.read_bytes()
        spoil(path)
        result = peer.export("--json", "--force", tmp_path / "m.pt")
        assert json.loads(result.stdout)["from"] == "checkpoint"
        assert f"model.safetensors {words}" in result.stderr and "a checkpoint is taken" in result.stderr
        assert f"model.safetensors {words}" in peer.refused(tmp_path / "n.pt", "--from", "final")
        path.write_bytes(whole)
    assert peer.facts("--force", tmp_path / "m.pt")["from"] == "final"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def test_several_runs(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    shutil.copytree(peer.folder, peer.folder.with_name("other"))
    assert "several runs, other, train; say which with --run NAME" in peer.refused(tmp_path / "m.pt")
    assert peer.facts("--run", "other", tmp_path / "m.pt")["run"] == "other"
    line = peer.refused("--run", "../train", tmp_path / "n.pt")
    assert "no run '../train'; give one of other, train as --run NAME" in line


# -- what is refused ----------------------------------------------------------------------------------------------


def test_nothing_is_replaced_unless_asked_for(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    peer.keep_inner()
    (tmp_path / "m.pt").write_text("mine")
    assert "m.pt exists; give another name, or --force to replace it" in peer.refused(tmp_path / "m.pt")
    (tmp_path / "n.optimizer.pt").write_text("mine")
    line = peer.refused("--with-optimizer", tmp_path / "n.pt")
    assert "n.optimizer.pt exists" in line
    assert (tmp_path / "m.pt").read_text() == (tmp_path / "n.optimizer.pt").read_text() == "mine"
    peer.facts("--force", tmp_path / "m.pt")
    assert "scale" in load(tmp_path / "m.pt")


def test_what_is_wrong_is_one_line_with_a_remedy(peer: Peer, tmp_path: Path) -> None:
    assert "no whole checkpoint here yet; try again in a minute" in peer.refused(tmp_path / "m.pt")
    assert "is not finished on this peer; --from checkpoint" in peer.refused(
        tmp_path / "m.pt", "--from", "final"
    )
    peer.checkpoint((3, 9))
    for words, line in (
        ([tmp_path / "m"], "end it in .safetensors or .pt, or give --format"),
        ([tmp_path], "end it in .safetensors or .pt, or give --format"),
        ([tmp_path, "--format", "torch"], "is a directory; give the name of a file"),
        ([tmp_path / "no" / "m.pt"], "no is no directory; make it"),
        (
            [tmp_path / "m.pt", "--from", "last"],
            "--from last: write final, checkpoint, or a view and a round",
        ),
        ([tmp_path / "m.pt", "--from", "3-10"], "has no whole checkpoint 3-10 here; there is 3-9"),
        ([tmp_path / "m.pt", "--with-optimizer"], "no optimizer state of run 'train'"),
    ):
        assert line in peer.refused(*words), words
    empty = CliRunner().invoke(main, ["export", "--home", str(tmp_path / "none"), str(tmp_path / "m.pt")])
    assert empty.exit_code == 1 and "none has no run; give the --home of a peer" in empty.stderr


def test_an_optimizers_state_that_is_no_use(peer: Peer, tmp_path: Path) -> None:
    peer.checkpoint((3, 9))
    peer.keep_inner(history=b"i" * 16)
    line = peer.refused("--with-optimizer", tmp_path / "m.pt")
    assert "is of another founding of run 'train'; leave out --with-optimizer" in line
    replaced = (Replaced(history=HISTORY, lineage=(3, 9)),)
    promises = Promises(history=b"i" * 16, replaced=replaced)
    run_files.save_record(peer.folder, run_files.RunRecord(promises=promises, closed=False, boot=1))
    assert peer.facts("--with-optimizer", tmp_path / "m.pt")["optimizer"], "the one took the other's place"
    (tmp_path / "m.pt").unlink()
    (tmp_path / "m.optimizer.pt").unlink()
    peer.keep_inner()
    damage(peer.folder / inner_state.TENSORS)
    line = peer.refused("--with-optimizer", tmp_path / "m.pt")
    assert "inner.safetensors is damaged; leave out --with-optimizer" in line


LITTLE_ROOM = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))  # bytes of any one file
from p2p_dmc.cli import main
main()
"""


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
def test_a_disk_without_room_is_one_line_and_leaves_nothing(peer: Peer, tmp_path: Path, ending: str) -> None:
    peer.checkpoint((3, 9))
    words = ["export", "--home", str(peer.home), str(tmp_path / f"m{ending}")]
    command = [sys.executable, "-c", LITTLE_ROOM, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "internal error" not in done.stderr and "File too large" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["home1"]


def test_a_checkpoint_that_goes_meanwhile_is_looked_for_anew(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.checkpoint((3, 8), seed=8)
    real, found = export._load, []

    def load_late(source: export.Source, fp32: bool) -> Any:
        found.append(source.lineage)
        if len(found) == 1:  # an agent that runs has written another, and kept one
            shutil.rmtree(source.path.parent)
            peer.checkpoint((3, 9), seed=9)
        return real(source, fp32)

    monkeypatch.setattr(export, "_load", load_late)
    assert peer.facts(tmp_path / "m.pt")["lineage"] == [3, 9]
    assert found == [(3, 8), (3, 9)]


def test_a_dtype_that_this_torch_lacks(peer: Peer, tmp_path: Path) -> None:
    held = peer.held((3, 9), seed=1)
    strange = [replace(spec, dtype="float5") for spec in peer.flat.specs]
    write_checkpoint(peer.folder, held, strange, HISTORY, False, 3)
    assert "parameter scale is float5" in peer.refused(tmp_path / "m.pt")
    assert peer.facts("--fp32", tmp_path / "m.pt")["dtypes"] == ["float32"]


def test_other_commands_do_not_pay_for_torch() -> None:
    code = "import sys, p2p_dmc.cli, p2p_dmc.agent.export; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
