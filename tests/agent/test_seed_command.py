"""seed-dataset up to where the agent starts: what it makes, and what it says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dmc.agent import seed_command
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.seed_command import NameTakenError
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from tests.data.helpers import make_tree, small_tree

OPTIONS: dict[str, Any] = {
    "capacity": 1 << 30,
    "name": None,
    "stem": None,
    "include": (),
    "exclude": (),
    "depth": 1,
    "append": False,
    "mode": None,
    "max_shard_size": 20_000,
    "order": None,
    "val_fraction": None,
    "replicas": None,
}


class Seeder:
    """One home and what the command says."""

    def __init__(self, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.home = Home(root / "home")
        self.home.create()
        self.tree = small_tree(root / "tree")
        self._capfd = capfd

    def __call__(self, **options: Any) -> tuple[list[Manifest], list[Manifest], list[str]]:
        """(manifests, those that are new, lines)."""
        with Console(as_json=False) as console:
            manifests, new = seed_command._shard(self.home, self.tree, {**OPTIONS, **options}, console)
        return manifests, new, self._capfd.readouterr().err.splitlines()


@pytest.fixture
def seeder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Seeder:
    return Seeder(tmp_path, capfd)


def test_a_data_set_that_has_grown(seeder: Seeder) -> None:
    [first], new, said = seeder(replicas=3)
    assert new == [first] and first.replicas == 3 and len(said) == 1
    make_tree(seeder.tree, {"zoo/a.txt": 5, "zoo/b.txt": 7})
    with pytest.raises(
        UserError, match=r"with 48 samples in \d+ shards, not 50 in .*, or use --append if it has"
    ):
        seeder()
    [second], new, said = seeder(append=True, mode="auto")
    assert new == [second] and second.parent == first.digest and second.replicas == 3
    assert said[-1] == f"2 new samples for data set 'tree', whose newest version is {first.digest.hex()[:12]}"
    [again], new, said = seeder(append=True)
    assert again == second and new == []
    assert said[1] == f"data set 'tree' {second.digest.hex()[:12]} has all of it already"
    (seeder.tree / "zoo/a.txt").unlink()
    (seeder.tree / "zoo/b.txt").unlink()
    assert seeder(replicas=3)[:2] == ([first], [])  # the older one, as it was
    [third], _, _ = seeder(name="other")
    assert third.replicas == 2 and third.mode == "file"


def test_nothing_of_a_version_that_is_refused_stays(seeder: Seeder) -> None:
    [first], _, _ = seeder()
    make_tree(seeder.tree, {"zoo/a.txt": 5})
    (seeder.tree / "class0/item000.txt").write_bytes(b"changed")
    with pytest.raises(UserError, match="'class0/item000': its field 'txt' is another"):
        seeder(append=True)
    assert [path.name for path in seeder.home.store_root.iterdir()] == [first.digest.hex()]


def test_a_broken_line_leaves_the_version_before_it(seeder: Seeder) -> None:
    seeder.tree = seeder.tree.with_name("rows.jsonl")
    seeder.tree.write_text('{"n": 1}\n{"n": 2}\n')
    [first], _, _ = seeder()
    for text, said in (('{"n": 3\n', "line 3.*; mend it"), ('{"n": 3', "line 3.*; the file ends in it")):
        seeder.tree.write_text('{"n": 1}\n{"n": 2}\n' + text)
        with pytest.raises(UserError, match=said):
            seeder(append=True)
        assert [path.name for path in seeder.home.store_root.iterdir()] == [first.digest.hex()]
    seeder.tree.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}')
    [second], _, _ = seeder(append=True)
    assert len(second) == 3 and second.parent == first.digest


@pytest.mark.parametrize(
    ("theirs", "is_taken"),
    [
        ({}, False),
        ({"name": "another", "dataset": "ff" * 16, "first": "ff" * 16}, False),
        ({"dataset": "ff" * 16, "first": "ff" * 16}, True),
        ({"dataset": "ff" * 16, "generation": 1}, False),
        ({"dataset": "ff" * 16, "generation": 0}, True),
    ],
)
def test_versions_of_one_data_set_do_not_take_each_others_name(
    seeder: Seeder, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, Any], is_taken: bool
) -> None:
    [mine], _, _ = seeder()
    digest = mine.digest.hex()
    facts = {"name": "tree", "dataset": digest, "first": digest, "generation": 0, **theirs}
    asked: list[tuple[str, ...]] = []

    def ask(addresses: tuple[str, ...], command: str, *, timeout_s: float) -> dict[str, Any]:
        asked.append(addresses)
        return {"datasets": [facts]}

    monkeypatch.setattr(seed_command, "ask", ask)
    if is_taken:
        remedy = (
            "append again, to theirs" if facts["first"] == digest else "seed this one under another --name"
        )
        said = f"'tree' is data set {facts['dataset']} of the peers at .* here; {remedy}"
        with pytest.raises(NameTakenError, match=said):
            seed_command._refuse_taken_names([mine], ("tcp://127.0.0.1:1",))
    else:
        seed_command._refuse_taken_names([mine], ("tcp://127.0.0.1:1",))
    assert asked == [("tcp://127.0.0.1:1",)]


def test_a_version_shares_its_files_with_the_one_before(seeder: Seeder) -> None:
    [first], _, _ = seeder()
    make_tree(seeder.tree, {"zoo/a.txt": 5})
    [second], _, _ = seeder(append=True)
    store = Store(seeder.home.store_root)
    before, after = (
        {path.stat().st_ino for path in (store.root / one.digest.hex()).rglob("*.tar")}
        for one in (first, second)
    )
    assert before < after and len(after) == len(second.shards)


def test_an_interrupt_that_comes_while_it_is_compared_leaves_nothing(
    seeder: Seeder, monkeypatch: pytest.MonkeyPatch
) -> None:
    [first], _, _ = seeder()
    make_tree(seeder.tree, {"zoo/a.txt": 5})
    from p2p_dmc.data import appending

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(appending, "_first_change", interrupted)
    with pytest.raises(KeyboardInterrupt):
        seeder(append=True)
    assert [path.name for path in seeder.home.store_root.iterdir()] == [first.digest.hex()]


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_a_clash_about_what_is_seeded_ends_the_command(seeder: Seeder, is_ours: bool) -> None:
    [manifest], _, _ = seeder()
    forgotten: list[bytes] = []
    turns = iter([False, False, False, True])
    data = SimpleNamespace(
        conflict="two data sets are named so",
        conflicting={manifest.digest if is_ours else bytes(16)},
        replicated_elsewhere=lambda: next(turns),
        forget=forgotten.append,
    )
    agent: Any = SimpleNamespace(data=data, membership=SimpleNamespace(seed_contacted=True))

    async def work() -> int:
        with Console(as_json=False) as console:
            return await seed_command._serve(agent, [manifest], True, True, console)

    if is_ours:
        with pytest.raises(NameTakenError, match="two data sets"):
            asyncio.run(work())
        assert forgotten == [manifest.digest]
    else:
        assert asyncio.run(work()) == 0 and not forgotten
