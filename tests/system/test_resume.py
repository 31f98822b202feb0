"""Clusters that were stopped, or lost power all at once, and go on from what is on their disks (DESIGN.md 6, 10)."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent.client import ask
from tests.system.checks import RUN
from tests.system.cluster import Cluster, Peer
from tests.system.scenario import NAMES, START_S, arguments, finish, start, train_together

EPOCHS = 6
THREE = NAMES[:3]


def three(cluster: Cluster, data: Path) -> list[Peer]:
    """Peers that train, each with all the data; who brought it has left."""
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "3", "--leave-when-replicated")
    peers = start(cluster, seed, THREE, "--checkpoint-every", "1s", epochs=EPOCHS)
    cluster.wait(lambda: not seed.running, "whoever brought the data leaves")
    return peers


def reopen(cluster: Cluster, names: Sequence[str], addresses: dict[str, str], **more: Any) -> list[Peer]:
    """The homes of that name, without a seed, each at the address that it had."""
    said = arguments(cluster, epochs=EPOCHS)
    return [cluster.join(n, "", *said, options=["--listen", addresses[n]], **more) for n in names]


def lineages(peer: Peer) -> list[tuple[int, int]]:
    """Of its checkpoints, newest first."""
    folders = (peer.home / "runs" / RUN / "checkpoints").glob("[0-9]*-*")
    found = [tuple(map(int, folder.name.split("-"))) for folder in folders]
    return sorted(((a, b) for a, b in found), reverse=True)


def digest(peer: Peer, lineage: tuple[int, int]) -> str:
    """Of the state in a checkpoint, ledger included."""
    folder = peer.home / "runs" / RUN / "checkpoints" / f"{lineage[0]}-{lineage[1]}"
    return str(json.loads((folder / "meta.json").read_text())["digest"])


def first_view(peer: Peer, after: float) -> dict[str, Any]:
    return next(v for v in peer.events("view") if v["time"] > after)


# -- stopped ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_any_two_of_three_go_on_where_they_were_stopped(cluster: Cluster, data: Path, tmp_path: Path) -> None:
    """Each pair from a copy of the same homes, from the same round with the same state; the third comes later."""
    peers = three(cluster, data)
    assert ask([peers[0].address], "stop")["stopping"]
    cluster.ended(peers)
    ends = {lineages(p)[0] for p in peers}
    assert len(ends) == 1, f"they stopped at different rounds: {ends}"
    end = ends.pop()
    states = {digest(p, end) for p in peers}
    assert len(states) == 1
    addresses = {p.name: p.address for p in peers}
    for pair in combinations(THREE, 2):
        root = tmp_path / "".join(pair)
        for name in THREE:
            shutil.copytree(cluster.root / name, root / name)
        with Cluster(root) as copy:
            when = time.time()
            two = reopen(copy, pair, addresses)
            train_together(copy, two, after=when)
            for peer in two:
                view = first_view(peer, when)
                assert (tuple(view["start"]), view["digest"]) == (end, *states)
                assert peer.rounds(when)[0]["round"] == end[1] + 1
                assert f"goes on from the checkpoint of view {end[0]} round {end[1]}" in peer.said()
            if pair == THREE[1:]:
                [third] = reopen(copy, THREE[:1], addresses)
                train_together(copy, [third, *two], after=when)
                finish(copy, [third, *two], epochs=EPOCHS)
                assert not copy.orphans()


# -- without power ------------------------------------------------------------------------------------------------


def test_all_lose_power_and_go_on_from_the_newest_that_is_whole(cluster: Cluster, data: Path) -> None:
    """While one is missing the others say so. It comes with a damaged checkpoint; then a new machine joins."""
    peers = three(cluster, data)
    cluster.wait(lambda: all(lineages(p)[:1] > [(1, 1)] for p in peers), "two rounds are on every disk")
    when = max([p.cut_power() for p in peers])
    *two, last = sorted(peers, key=lambda p: lineages(p)[0], reverse=True)
    newest = lineages(two[0])[0]
    state = digest(two[0], newest)
    addresses = {p.name: p.address for p in peers}
    reopen(cluster, [p.name for p in two], addresses)
    for peer in two:
        wait_for_word(cluster, peer, f"waiting for {last.name} ({last.peer_id[:8]})")

    damaged = last.home / "runs" / RUN / "checkpoints" / "{}-{}".format(*lineages(last)[0])
    half = damaged.with_name(f".{newest[0]}-{newest[1] + 1}.new.tmp")
    shutil.copytree(damaged, half)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    reopen(cluster, [last.name], addresses)
    train_together(cluster, peers, after=when)
    said = last.said()
    assert f"checkpoint {damaged} is skipped: model.safetensors is damaged\n" in said
    assert f"checkpoint {half} is skipped: its writing did not come to its end\n" in said
    for peer in peers:
        view = first_view(peer, when)
        assert (tuple(view["start"]), view["digest"]) == (newest, state)
        assert re.search(r"^view \d+: 3 peers, [abc], [abc], [abc]$", peer.said(), re.M), "all by their names"

    new = cluster.join("new", two[0], *arguments(cluster, epochs=EPOCHS))
    cluster.listening(new)
    train_together(cluster, [*peers, new], after=when)
    finish(cluster, [*peers, new], epochs=EPOCHS)


def wait_for_word(cluster: Cluster, peer: Peer, words: str) -> None:
    """Wait until a peer says why it waits: in a line of its own, and to whoever asks for its status."""
    cluster.wait(lambda: words in peer.said(), f"{peer.name} says {words!r}", START_S)
    [run] = ask([peer.address], "status")["runs"]
    assert words in run["waiting"]
