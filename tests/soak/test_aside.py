"""A peer that is killed as it begins to stand aside, or meanwhile: of three hosts, nothing passes between two."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from p2p_dmc.observe.phases import give
from tests.soak.hosts import Hosts, can_lose, missing_tools
from tests.system.cluster import Peer, write_samples
from tests.system.scenario import EPOCHS, START_S, arguments, finish, recovered, struck, train_together

NAMES = ("seed", "b", "c")
ALLOWED = not missing_tools() and can_lose()


def three_hosts(root: Path) -> tuple[Hosts, list[Peer]]:
    """They train; nothing is broken yet."""
    hosts = Hosts(root / "peers", NAMES)
    first = hosts.seed(
        write_samples(root / "tiny", 320), "--name", "tiny", "--insecure", address=hosts.address_of("seed")
    )
    for name in NAMES:
        listen = [] if name == "seed" else ["--insecure", "--listen", hosts.address_of(name)]
        peer = hosts.join(name, first, *arguments(hosts), options=["--min-peers", "3", *listen])
        hosts.listening(peer)
    return hosts, hosts.peers


@pytest.mark.long
@pytest.mark.parametrize("exactly", [True, False], ids=["as it begins", "meanwhile"])
def test_whoever_is_killed_in_standing_aside_holds_nobody_up(tmp_path: Path, exactly: bool) -> None:
    """Of the two that do not hear each other the greater one gives way, so the lesser and the third go on."""
    if not ALLOWED:
        assert missing_tools() or not can_lose()
        return
    hosts, peers = three_hosts(tmp_path)
    with hosts:
        train_together(hosts, peers)
        third, lesser, greater = peers[0], *sorted(peers[1:], key=lambda peer: peer.peer_id)
        if exactly:
            give(hosts.orders / greater.name, "aside", "kill")
        broken = [(deaf, hosts.silence(deaf, mute)) for deaf, mute in ((lesser, greater), (greater, lesser))]
        cut_s = time.time()
        if exactly:
            when = struck(hosts, hosts.orders / greater.name, "aside")
            assert greater.events("stands_aside") and not greater.events("withdrawn"), "it has said so"
        else:
            hosts.wait(lambda: greater.events("stands_aside"), "it stands aside", START_S)
            when = greater.kill_tree()
        for one in (lesser, third):
            hosts.wait(lambda one=one: recovered(one, greater.peer_id, cut_s), f"{one.name} goes on", START_S)
        assert all(hosts.silence_no_more(deaf, table) > 0 for deaf, table in broken), "nothing was dropped"
        hosts.wait(lambda: not greater.running, "it is gone", START_S)
        hosts.restart(greater)
        train_together(hosts, peers, after=when)
        finish(hosts, peers, epochs=EPOCHS)
