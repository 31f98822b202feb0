"""One data set as a peer knows it: placed anew only when something changed; lasting dissent is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2p_dmc.agent.known import DataWatch, Known
from p2p_dmc.core.placement import StoringPeer, placement
from p2p_dmc.core.repair import Said, copies_of
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.observe.journal import Journal
from tests.agent.helpers import peer
from tests.data.helpers import seed_tree, small_tree

STILL_S = 20.0
NOTHING = copies_of({}, frozenset(), False, 1)
NAMES = {peer(2): "bob", peer(3): "carol"}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("known")
    return seed_tree(small_tree(folder / "tree", folders=2, samples=4), Store(folder / "store"))


def storing_peers(*domains: str) -> tuple[StoringPeer, ...]:
    return tuple(StoringPeer(peer_id=peer(i + 1), domain=domain) for i, domain in enumerate(domains))


class Watched:
    """A data set, the watch over it, and what it said."""

    def __init__(self, manifest: Manifest, root: Path) -> None:
        self.known = Known(manifest=manifest)
        self.known.place(storing_peers("", "", ""))
        self.said: list[str] = []
        self.journal = Journal(root, peer(1))
        self.watch = DataWatch(self.said.append, self.journal, STILL_S)

    def hears(self, i: int, digest: bytes | None = None) -> None:
        """Peer i means this placement, or that of this peer."""
        assert self.known.placed is not None
        self.known.others[peer(i)] = Said(copies=NOTHING, placement=digest or self.known.placed.digest())

    def at(self, now_s: float) -> list[str]:
        """What is said then."""
        self.said.clear()
        self.watch.dissent(self.known, NAMES, now_s)
        return list(self.said)


@pytest.fixture
def watched(manifest: Manifest, tmp_path: Path) -> Watched:
    return Watched(manifest, tmp_path)


def test_it_is_placed_anew_only_when_a_peer_changed(manifest: Manifest) -> None:
    known = Known(manifest=manifest)
    assert known.place(()) and known.placed is not None and known.placed.peers == ()
    assert known.place(storing_peers("", "a", "a")) and not known.place(storing_peers("", "a", "a")[::-1])
    assert known.place(storing_peers("", "a", "b"))
    whole = placement(manifest.shard_digests, storing_peers("", "a", "b"), manifest.replicas)
    assert known.placed.digest() == whole.digest()


def test_dissent_that_lasts_is_named_once_and_its_end_too(watched: Watched) -> None:
    watched.hears(2)
    watched.hears(3, b"x" * 16)
    assert watched.known.dissenters() == [peer(3)]
    assert watched.at(100.0) == watched.at(119.9) == []
    (line,) = watched.at(120.0)
    assert watched.known.placed is not None
    assert line.startswith(f"carol places data set {watched.known.manifest.name!r} otherwise")
    assert (b"x" * 16).hex()[:12] in line and watched.known.placed.digest().hex()[:12] in line
    assert watched.at(130.0) == []
    watched.hears(3, b"y" * 16)  # otherwise, still
    assert watched.at(1000.0) == []
    watched.hears(3)
    assert watched.at(1001.0) == [
        f"carol places data set {watched.known.manifest.name!r} as this peer does again"
    ]
    assert watched.at(2000.0) == [] and watched.known.dissents == {}


def test_dissent_that_passes_is_not_named(watched: Watched) -> None:
    watched.hears(3, b"x" * 16)
    assert watched.at(100.0) == watched.at(119.0) == []
    watched.hears(3)
    assert watched.at(119.5) == []
    watched.hears(3, b"x" * 16)
    assert watched.at(121.0) == watched.at(140.0) == []
    assert len(watched.at(141.0)) == 1


def test_while_either_side_still_changes_nobody_is_named(watched: Watched) -> None:
    for step in range(10):
        watched.hears(3, bytes([step]) * 16)
        assert watched.at(100.0 + 15 * step) == []
    watched.hears(3, b"x" * 16)
    for step in range(10):
        watched.known.place(storing_peers("", "", f"d{step}"))
        assert watched.at(300.0 + 15 * step) == []
    assert len(watched.at(300.0 + 15 * 9 + STILL_S)) == 1


def test_of_a_dissenter_that_is_gone_nothing_is_said(watched: Watched) -> None:
    watched.hears(3, b"x" * 16)
    watched.at(100.0)
    assert len(watched.at(120.0)) == 1
    del watched.known.others[peer(3)]
    assert watched.at(121.0) == [] and watched.known.dissents == {}


def test_before_it_is_placed_nobody_dissents_aloud(manifest: Manifest, tmp_path: Path) -> None:
    watched = Watched(manifest, tmp_path)
    watched.hears(2)
    watched.known.placed = None
    assert watched.at(100.0) == watched.at(1000.0) == []
