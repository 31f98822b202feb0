"""Membership under a virtual clock: what SWIM and Lifeguard promise, and what we add to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from p2p_dmc.core.membership import (
    Gossip,
    MembershipSettings,
    MemberState,
    Ping,
    Role,
)
from tests.core.gossip_network import Network, Node, address_of, peer_id_of, sender_of

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
LAN = MembershipSettings.lan()
SILENCE_BOUND_MS = 4_000


def others(nodes: list[Node], *gone: Node) -> list[Node]:
    return [node for node in nodes if node not in gone]


# Joining.


@pytest.mark.parametrize(("size", "within_ms"), [(2, 100), (5, 1_000), (16, 2_000), (64, 4_000)])
def test_all_learn_of_all(size: int, within_ms: int) -> None:
    net = Network(size)
    nodes = [net.add(number, 0) for number in range(size)]
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), within_ms)
    assert all(len(node.core.members()) == size for node in nodes)
    assert all(node.core.seed_contacted for node in nodes)


def test_all_learn_of_all_with_a_fifth_of_the_messages_lost() -> None:
    net = Network(3, loss=0.2)
    nodes = [net.add(number, 0) for number in range(16)]
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 10_000)
    assert net.lost > 0.1 * net.sends


def test_a_peer_started_before_its_seed_waits_for_it() -> None:
    net = Network()
    early = net.add(1, 0)
    net.run(60_000)
    assert not early.core.seed_contacted
    assert net.sends == pytest.approx(60, abs=2)
    seed = net.add(0)
    net.run_until(lambda: net.agree([early, seed], ALIVE, [early, seed]), 1_100)
    assert all(node.core.seed_contacted for node in (early, seed))


def test_a_seed_list_with_my_own_address_is_no_contact() -> None:
    net = Network()
    node = net.add(0, 0)
    net.run(10_000)
    assert net.sends == 0 and not node.core.seed_contacted


def test_facts_travel_with_their_reason() -> None:
    net = Network()
    a, b, c = net.cluster(3)
    net.act(a, a.core.update(net.now_ms, meta=b"capacity", role=Role.STORE))
    net.run_until(lambda: all(n.core.get(a.peer_id) == a.core.me for n in (b, c)), 500)
    assert a.core.me.meta == b"capacity" and a.core.me.role is Role.STORE and a.core.me.incarnation == 1
    assert any("role, meta changed" in reason for reason in b.reasons(a, ALIVE))
    assert a.core.update(net.now_ms, meta=b"capacity").sends == ()  # no change, no word
    with pytest.raises(ValueError, match="2049"):
        a.core.update(net.now_ms, meta=bytes(2049))
    assert a.core.me.incarnation == 1


def test_members_are_sorted_and_complete() -> None:
    net = Network()
    nodes = net.cluster(5)
    ids = [record.peer_id for record in nodes[3].core.members()]
    assert ids == sorted(node.peer_id for node in nodes)


# Death and suspicion.


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("seed", range(4))
def test_silence_is_dead_everywhere_within_the_bound(size: int, seed: int) -> None:
    net = Network(seed)
    nodes = net.cluster(size)
    net.run(net.rng.randrange(5_000))
    victim = nodes[net.rng.randrange(size)]
    net.kill(victim)
    rest = others(nodes, victim)
    took_ms = net.run_until(lambda: net.agree(rest, DEAD, [victim]), SILENCE_BOUND_MS)
    assert took_ms > 1_500  # not hasty either
    assert net.agree(rest, ALIVE, rest)
    assert any(reason.startswith("silent for") for node in rest for reason in node.reasons(victim, DEAD))


@pytest.mark.parametrize("seed", range(3))
def test_half_of_eight_silent_at_once(seed: int) -> None:
    net = Network(seed)
    nodes = net.cluster(8)
    net.run(3_000)
    dead, rest = nodes[:4], nodes[4:]  # the seed among them
    for node in dead:
        net.kill(node)
    net.run_until(lambda: net.agree(rest, DEAD, dead), 12_000)
    net.run(5_000)
    assert net.agree(rest, ALIVE, rest)


@pytest.mark.parametrize("size", [2, 4, 16])
def test_a_refused_connection_is_dead_everywhere_at_once(size: int) -> None:
    net = Network(5)
    nodes = net.cluster(size)
    net.run(2_000)
    victim = nodes[-1]
    net.kill(victim, refuses=True)
    rest = others(nodes, victim)
    net.run_until(lambda: DEAD in [node.state_of(victim) for node in rest], 1_100)
    net.run_until(lambda: net.agree(rest, DEAD, [victim]), 20)
    assert any("refused by its host" in reason for node in rest for reason in node.reasons(victim, DEAD))


def test_a_refusal_counts_for_the_boot_it_was_seen_at_only() -> None:
    net = Network()
    a, b = net.cluster(2)
    assert a.core.refused(b.peer_id, 0, net.now_ms).events == ()
    assert a.core.refused(peer_id_of(9), 1, net.now_ms).events == ()
    assert a.core.refused(a.peer_id, 1, net.now_ms).events == ()
    assert a.state_of(b) is ALIVE


def test_a_mistaken_refusal_is_refuted() -> None:
    net = Network()
    nodes = net.cluster(4)
    net.act(nodes[0], nodes[0].core.refused(nodes[2].peer_id, 1, net.now_ms))
    assert nodes[0].state_of(nodes[2]) is DEAD
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 1_500)
    assert nodes[2].core.me.incarnation == 1 and nodes[2].core.health >= 0


def test_a_false_suspicion_is_refuted() -> None:
    net = Network()
    nodes = net.cluster(5)
    accused = nodes[2]
    rumour = replace(accused.core.me, state=SUSPECT, accusers=(peer_id_of(0),))
    for node in (nodes[1], nodes[3]):
        net.act(node, node.core.receive(Gossip(sender=sender_of(0), records=(rumour,)), net.now_ms))
    assert nodes[1].state_of(accused) is SUSPECT
    net.run_until(lambda: net.agree(nodes, ALIVE, [accused]), 500)
    assert accused.core.me.incarnation == 1
    assert "refuted the suspicion" in nodes[1].reasons(accused, ALIVE)
    assert any(reason.startswith("refuted: SUSPECT") for reason in accused.reasons(accused, ALIVE))
    net.run(10_000)
    assert not any(node.reasons(accused, DEAD) for node in nodes)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_pause_of_a_second_kills_nobody(size: int) -> None:
    suspected = 0
    for seed in range(5):
        net = Network(seed)
        nodes = net.cluster(size)
        sleeper = nodes[seed % size]
        net.pause(sleeper, 1_000)
        net.run(8_000)
        suspected += sum(bool(node.reasons(sleeper, SUSPECT)) for node in nodes)
        assert net.agree(nodes, ALIVE, nodes)
        assert not any(event.new is DEAD for node in nodes for _, event in node.events)
    assert suspected, "the pause was noticed by nobody, so this test tests nothing"


def test_a_stopped_peer_is_declared_dead_and_welcome_when_it_wakes() -> None:
    net = Network(2)
    nodes = net.cluster(4)
    net.run(3_000)
    sleeper, rest = nodes[1], others(nodes, nodes[1])
    net.pause(sleeper, 20_000)
    net.run_until(lambda: net.agree(rest, DEAD, [sleeper]), SILENCE_BOUND_MS)
    net.run(15_000)
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 4_000)
    assert not any(event.new in (SUSPECT, DEAD) for _, event in sleeper.events), "it judged by time it slept"


def test_somebody_probes_everybody_within_two_intervals() -> None:
    net = Network(9)
    nodes = net.cluster(16)
    pinged_ms = {node.address: [net.now_ms] for node in nodes}
    net.on_send = lambda send: (
        pinged_ms[send.address].append(net.now_ms) if isinstance(send.message, Ping) else None
    )
    net.run(30_000)
    gaps_ms = [b - a for times in pinged_ms.values() for a, b in pairwise([*times, net.now_ms])]
    assert max(gaps_ms) <= 2 * LAN.probe_interval_ms


def test_one_way_cut_between_two_of_four_kills_nobody() -> None:
    net = Network(4)
    nodes = net.cluster(4)
    net.cut_between([nodes[1]], [nodes[2]], both=False)
    net.run(60_000)
    assert net.lost > 10
    assert net.agree(nodes, ALIVE, nodes)
    assert not any(event.new is DEAD for node in nodes for _, event in node.events)


def test_a_deaf_peer_starts_no_storm_and_is_found_dead() -> None:
    net = Network(4)
    nodes = net.cluster(6)
    deaf, rest = nodes[2], others(nodes, nodes[2])
    net.cut_between(rest, [deaf], both=False)
    net.run_until(lambda: net.agree(rest, DEAD, [deaf]), 6_000)
    net.run(30_000)
    assert net.agree(rest, ALIVE, rest)
    assert not any(event.new is DEAD and event.peer_id != deaf.peer_id for n in rest for _, event in n.events)
    net.heal()
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 30_000)


@pytest.mark.parametrize("spike_ms", [600, 1_000])
def test_delay_spikes_kill_nobody(spike_ms: int) -> None:
    net = Network(6)
    nodes = net.cluster(5)
    for _ in range(5):
        net.delay_ms = (spike_ms // 2, spike_ms)
        net.run(800)
        net.delay_ms = (1, 5)
        net.run(3_000)
    assert net.agree(nodes, ALIVE, nodes)
    assert not any(event.new is DEAD for node in nodes for _, event in node.events)


# Leaving and coming back.


def test_leaving_is_known_at_once_and_is_not_death() -> None:
    net = Network()
    nodes = net.cluster(8)
    goer, rest = nodes[0], nodes[1:]
    net.act(goer, goer.core.leave(net.now_ms))
    net.run_until(lambda: net.agree(rest, LEFT, [goer]), 20)
    net.run(500)
    goer.up = False
    net.run(30_000)
    assert net.agree(rest, LEFT, [goer])
    net.run(90_000)
    assert net.agree(rest, None, [goer]), "remembered for ever"
    assert goer.core.leave(net.now_ms).sends == ()


def test_one_that_left_accuses_nobody_and_only_repeats_that_it_left() -> None:
    net = Network()
    a, b, c = net.cluster(3)
    net.act(a, a.core.leave(net.now_ms))
    before = len(a.events)
    net.kill(b)
    net.kill(c)
    net.run(20_000)
    assert len(a.events) == before
    assert a.core.refused(b.peer_id, 1, net.now_ms).events == ()
    assert a.core.update(net.now_ms, meta=b"late").sends == ()
    ping = Ping(sender=sender_of(1), seq=1, peer_id=a.peer_id, boot=1, incarnation=0)
    (answer,) = a.core.receive(ping, net.now_ms).sends
    assert isinstance(answer.message, Gossip) and answer.message.records == (a.core.me,)


@pytest.mark.parametrize("facts", [{"boot": 2}, {"boot": 1, "incarnation": 7}])
def test_rejoin_after_leaving(facts: dict[str, int]) -> None:
    net = Network()
    nodes = net.cluster(4)
    goer, rest = nodes[2], others(nodes, nodes[2])
    net.act(goer, goer.core.leave(net.now_ms))
    net.run(2_000)
    back = net.add(2, 0, **facts)
    net.run_until(lambda: net.agree([*rest, back], ALIVE, [*rest, back]), 1_000)
    net.run(10_000)
    assert net.agree([*rest, back], ALIVE, [*rest, back])


def test_a_restart_is_the_end_of_one_boot_and_the_start_of_another() -> None:
    net = Network()
    nodes = net.cluster(4)
    rest = others(nodes, nodes[1])
    net.kill(nodes[1])
    again = net.add(1, 0, boot=2)
    net.run_until(lambda: all(n.core.get(again.peer_id) == again.core.me for n in rest), 1_000)
    seen = [e for _, e in rest[0].events if e.peer_id == again.peer_id][-2:]
    assert [(e.old, e.new, e.record.boot) for e in seen] == [(ALIVE, DEAD, 1), (DEAD, ALIVE, 2)]
    net.run(10_000)
    assert net.agree([*rest, again], ALIVE, [*rest, again])


def test_mass_restart_cannot_be_refuted_by_the_dead() -> None:
    net = Network(8)
    nodes = net.cluster(6)
    for node in nodes[1:]:  # many refutations, then death at a high incarnation
        for number in range(100):
            net.act(node, node.core.update(net.now_ms, meta=str(number).encode()))
    net.run(2_000)
    for node in nodes[1:]:
        net.kill(node)
    net.run_until(lambda: net.agree(nodes[:1], DEAD, nodes[1:]), 15_000)
    again = [nodes[0], *(net.add(number, 0, boot=2) for number in range(1, 6))]
    net.run_until(lambda: net.agree(again, ALIVE, again), 2_000)
    net.run(20_000)
    assert net.agree(again, ALIVE, again)


def test_another_peer_at_the_address_ends_the_old_one() -> None:
    net = Network(3)
    nodes = net.cluster(4)
    rest = others(nodes, nodes[2])
    newcomer = net.add(77, 0, address=nodes[2].address)
    net.run_until(lambda: net.agree(rest, DEAD, [nodes[2]]), 2_500)
    reasons = [reason for node in rest for reason in node.reasons(nodes[2], DEAD)]
    assert any("answers at its address" in reason for reason in reasons)
    net.run(10_000)
    everybody = [*rest, newcomer]
    assert net.agree(everybody, ALIVE, everybody)


def test_two_peers_of_one_name_are_two_peers() -> None:
    net = Network()
    nodes = [net.add(0, name="box"), net.add(1, 0, name="box")]
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 1_000)


def test_two_hosts_with_one_identity_are_told_and_do_not_flap() -> None:
    net = Network()
    a, b = net.cluster(2)
    clone = net.add(0, 1, address=address_of(50))
    net.run(60_000)
    for node in (a, clone):
        clashes = [e for _, e in node.events if "identity clash" in e.reason]
        assert len(clashes) <= 1
    assert any("identity clash" in e.reason for node in (a, clone) for _, e in node.events)
    assert a.core.me.incarnation + clone.core.me.incarnation < 10, "they outbid each other"
    assert sum(e.peer_id == a.peer_id for _, e in b.events) < 10, "they flap"


# Partitions.


@pytest.mark.parametrize(("size", "cut_ms"), [(4, 10_000), (16, 60_000)])
def test_a_healed_partition_merges(size: int, cut_ms: int) -> None:
    net = Network(size)
    nodes = net.cluster(size)
    left, right = nodes[: size // 2], nodes[size // 2 :]
    net.cut_between(left, right)
    net.run_until(lambda: net.agree(left, DEAD, right) and net.agree(right, DEAD, left), 30_000)
    assert net.agree(left, ALIVE, left) and net.agree(right, ALIVE, right)
    net.run(cut_ms)
    net.heal()
    net.run_until(lambda: net.agree(nodes, ALIVE, nodes), 20_000)


def test_two_clusters_formed_apart_merge_through_a_seed_that_was_away() -> None:
    net = Network(1)
    left = [net.add(0), net.add(1, 0)]
    right = [net.add(2, 0), net.add(3, 2)]
    net.cut_between(left, right)
    net.run(10_000)
    assert net.agree(left, None, right)
    net.heal()
    net.run_until(lambda: net.agree([*left, *right], ALIVE, [*left, *right]), 6_500)


# Costs.


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_idle_members_hardly_speak(size: int) -> None:
    net = Network(size)
    net.cluster(size)
    net.run(10_000)
    sends, sent_bytes = net.sends, net.sent_bytes
    net.run(20_000)
    assert (net.sends - sends) / 20 / size < 5  # a ping and an ack, twice a second
    assert (net.sent_bytes - sent_bytes) / 20 / size < 1_500


def test_idle_members_ask_for_few_ticks() -> None:
    net = Network(1)
    nodes = net.cluster(4)
    net.run(10_000)
    ticks = net.ticks
    net.run(20_000)
    assert (net.ticks - ticks) / 20 / len(nodes) <= 3
