"""Ways between hosts are broken: one stands aside, is killed as it begins to, or meanwhile; one cannot join."""

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


def three_hosts(
    root: Path, *deaf: tuple[str, str], epochs: int = EPOCHS
) -> tuple[Hosts, list[Peer], list[tuple[Peer, str]]]:
    """They begin to train. ``deaf``: (who, to whom) from the first; what comes last is how to undo each of these."""
    hosts = Hosts(root / "peers", (*NAMES, "d"))
    first = hosts.seed(
        write_samples(root / "tiny", 320), "--name", "tiny", "--insecure", address=hosts.address_of("seed")
    )
    named = {name: hosts.peer(name) for name in NAMES[1:]} if deaf else {}
    broken = [(named[who], hosts.silence(named[who], named[whom])) for who, whom in deaf]
    for name in NAMES:
        listen = [] if name == "seed" else ["--insecure", "--listen", hosts.address_of(name)]
        peer = hosts.join(
            name, first, *arguments(hosts, epochs=epochs), options=["--min-peers", "3", *listen]
        )
        hosts.listening(peer)
    return hosts, list(hosts.peers), broken


@pytest.mark.long
@pytest.mark.parametrize("exactly", [True, False], ids=["as it begins", "meanwhile"])
def test_whoever_is_killed_in_standing_aside_holds_nobody_up(tmp_path: Path, exactly: bool) -> None:
    """Of the two that do not hear each other the greater one gives way, so the lesser and the third go on."""
    if not ALLOWED:
        assert missing_tools() or not can_lose()
        return
    hosts, peers, _ = three_hosts(tmp_path)
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


@pytest.mark.long
@pytest.mark.parametrize("deaf", [[("b", "c")], [("b", "c"), ("c", "b")]], ids=["one way", "both ways"])
def test_three_that_cannot_all_hear_each_other_found_a_run(
    tmp_path: Path, deaf: list[tuple[str, str]]
) -> None:
    """One of the two gives way before there is a view, the others begin, and it joins them once the way is whole."""
    if not ALLOWED:
        assert missing_tools() or not can_lose()
        return
    hosts, peers, broken = three_hosts(tmp_path, *deaf)
    with hosts:
        aside = [peer for peer in peers[1:] if len(deaf) == 2 or peer.name == "b"]
        hosts.wait(lambda: any(peer.events("stands_aside") for peer in aside), "one stands aside", START_S)
        (out,) = [peer for peer in aside if peer.events("stands_aside")]
        for one in peers:
            if one is not out:
                hosts.wait(lambda one=one: one.rounds(), f"{one.name} trains", START_S)
        assert not out.rounds()
        assert all(hosts.silence_no_more(*one) > 0 for one in broken), "nothing was dropped"
        train_together(hosts, peers, after=time.time())
        finish(hosts, peers, epochs=EPOCHS)


@pytest.mark.long
def test_a_newcomer_that_does_not_hear_one_of_them_stops_the_others_for_moments(tmp_path: Path) -> None:
    """Its firewall lets none of that one's connections in. It joins once it does."""
    if not ALLOWED:
        assert missing_tools() or not can_lose()
        return
    hosts, peers, _ = three_hosts(tmp_path, epochs=60)
    with hosts:
        train_together(hosts, peers)
        newcomer, mute = hosts.peer("d"), hosts.peer("b")
        table, begun_s = hosts.silence(newcomer, mute, only_calls=True), time.time()
        options = ["--insecure", "--listen", hosts.address_of("d")]
        hosts.join("d", hosts.peer("seed"), *arguments(hosts, epochs=60), options=options)

        def goes_on_without(peer: Peer) -> bool:
            views = [view for view in peer.events("view") if view["time"] > begun_s]
            epochs = [view["view_epoch"] for view in views if view["learners"]]
            done = [r for r in peer.rounds(begun_s) if epochs and r["view_epoch"] > epochs[-1]]
            return len(epochs) >= 2 and len(done) >= 2

        hosts.wait(lambda: all(map(goes_on_without, peers)), "the others go on", START_S)
        assert not newcomer.rounds() and hosts.silence_no_more(newcomer, table) > 0, "nothing was dropped"
        train_together(hosts, [*peers, newcomer], after=time.time())
        finish(hosts, [*peers, newcomer], epochs=60)
