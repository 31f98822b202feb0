"""Membership under a virtual clock: what SWIM and Lifeguard promise, and what we add to them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.member_table import join, precedence
from p2p_dmc.core.membership import (
    Gossip,
    MemberRecord,
    Membership,
    MembershipSettings,
    MemberState,
    Ping,
    PushPull,
    Role,
    Sender,
)
from p2p_dmc.core.membership_messages import INCARNATION_LIMIT
from p2p_dmc.errors import RemoteProtocolError
from tests.core.gossip_network import Network, Node, address_of, peer_id_of, record_of

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
LAN = MembershipSettings.lan()
SILENCE_BOUND_MS = 4_000


def sender_of(number: int, boot: int = 1, incarnation: int = 0) -> Sender:
    return Sender(peer_id=peer_id_of(number), boot=boot, incarnation=incarnation, address=address_of(number))


def lone(number: int = 0, seeds: tuple[str, ...] = (), **facts: object) -> Membership:
    return Membership(record_of(number, **facts), seeds, LAN, random.Random(7), 0)


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
    assert early.core.seed_contacted and seed.core.seed_contacted


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


def test_an_earlier_life_is_fenced_and_told() -> None:
    new = lone()
    new.receive(Gossip(sender=sender_of(1, boot=5), records=(record_of(1, boot=5),)), 0)
    stranger = record_of(2)
    out = new.receive(Gossip(sender=sender_of(1, boot=4), records=(stranger,)), 10)
    assert new.get(stranger.peer_id) is None, "believed a ghost"
    (told,) = [send.message for send in out.sends]
    assert told.records == (record_of(1, boot=5),)


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


# Beliefs.


def records(subjects: int = 3) -> st.SearchStrategy[MemberRecord]:
    def build(number: int, boot: int, incarnation: int, state: MemberState, who: list[int]) -> MemberRecord:
        accusers = tuple(sorted({peer_id_of(n) for n in who})) if state is SUSPECT else ()
        facts = {"boot": boot, "incarnation": incarnation, "meta": f"{boot}.{incarnation}".encode()}
        return record_of(
            number, state=state, accusers=accusers, attested=state is DEAD and len(who) > 1, **facts
        )

    return st.builds(
        build,
        st.integers(1, subjects),
        st.integers(1, 2),
        st.integers(0, 2),
        st.sampled_from(MemberState),
        st.lists(st.integers(20, 32), max_size=10, unique=True).map(lambda who: who[:8]),
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(records(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_records_in_any_order_end_in_the_same_belief(said: list[MemberRecord], rng: random.Random) -> None:
    beliefs = []
    for _ in range(3):
        core = lone()
        for record in said:
            core.receive(Gossip(sender=sender_of(9), records=(record,)), 0)
            core.check_invariants()
        beliefs.append(core.members())
        rng.shuffle(said)
    assert beliefs[0] == beliefs[1] == beliefs[2]
    for record in beliefs[0]:  # the oracle: the newest of all that was said
        of_it = [other for other in said if other.peer_id == record.peer_id]
        if of_it:
            newest = max(of_it, key=precedence)
            assert replace(record, accusers=()) == replace(newest, accusers=())


@settings(max_examples=100, deadline=None)
@given(records(1), records(1), records(1))
def test_join_is_a_semilattice(a: MemberRecord, b: MemberRecord, c: MemberRecord) -> None:
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert join(a, a) == a


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(MemberState)), max_size=6), st.randoms())
def test_accusations_of_me_in_any_order_end_above_them_all(
    said: list[tuple[int, MemberState]], rng: random.Random
) -> None:
    rng.shuffle(said)
    core = lone()
    for incarnation, state in said:
        rumour = record_of(0, incarnation=incarnation, state=state)
        core.receive(Gossip(sender=sender_of(9), records=(rumour,)), 0)
    assert core.me.state is ALIVE
    accused = [incarnation for incarnation, state in said if state is not ALIVE]
    highest = max((incarnation for incarnation, _ in said), default=-1)
    assert all(core.me.incarnation > incarnation for incarnation in accused)
    assert highest <= core.me.incarnation <= highest + 1


def test_the_accused_is_told_when_it_speaks() -> None:
    core = lone()
    dead = record_of(1, state=DEAD, incarnation=3)
    core.receive(Gossip(sender=sender_of(9), records=(dead,)), 0)
    out = core.receive(Gossip(sender=sender_of(1, incarnation=3)), 1_000)
    assert [(s.address, s.message.records) for s in out.sends] == [(address_of(1), (dead,))]
    again = core.receive(Gossip(sender=sender_of(1, incarnation=3)), 1_001)
    assert again.sends == (), "told once, not for each message"
    core.receive(Gossip(sender=sender_of(1, incarnation=4), records=(record_of(1, incarnation=4),)), 1_002)
    assert core.get(peer_id_of(1)) == record_of(1, incarnation=4)


def test_death_by_push_pull_is_a_suspicion_unless_attested_or_left() -> None:
    core = lone()
    known = tuple(record_of(number) for number in (1, 2, 3, 9))
    core.receive(Gossip(sender=sender_of(9), records=known), 0)
    said = (
        record_of(1, state=DEAD),
        record_of(2, state=DEAD, attested=True),
        record_of(3, state=LEFT),
        record_of(4, state=DEAD),
        record_of(5, state=LEFT),
    )
    core.receive(PushPull(sender=sender_of(9), seq=1, reply=False, records=said), 0)
    states = [record and record.state for record in map(core.get, map(peer_id_of, range(1, 6)))]
    assert states == [SUSPECT, DEAD, LEFT, DEAD, None]
    assert core.get(peer_id_of(1)) == record_of(1, state=SUSPECT, accusers=(peer_id_of(9),))


def test_a_stranger_that_speaks_is_asked_for_its_record() -> None:
    core = lone()
    out = core.receive(Ping(sender=sender_of(1), seq=5, peer_id=peer_id_of(0), boot=1, incarnation=0), 10)
    kinds = sorted(type(send.message).__name__ for send in out.sends)
    assert kinds == ["Ack", "PushPull"]
    assert all(send.address == address_of(1) for send in out.sends)


def test_the_forgotten_stay_forgotten() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1, state=LEFT, incarnation=2),)), 0)
    for now_ms in range(0, LAN.forget_left_ms + 10_000, 100):
        core.tick(now_ms)
    assert core.get(peer_id_of(1)) is None
    stale = record_of(1, incarnation=2)
    core.receive(Gossip(sender=sender_of(9), records=(stale,)), now_ms)
    assert core.get(peer_id_of(1)) is None
    core.receive(Gossip(sender=sender_of(9), records=(replace(stale, boot=2, incarnation=0),)), now_ms)
    assert core.get(peer_id_of(1)) is not None


# Limits.


def test_an_accusation_at_the_limit_is_believed_by_nobody() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1),)), 0)
    for number in (0, 1):
        rumour = record_of(number, state=DEAD, incarnation=INCARNATION_LIMIT)
        core.receive(Gossip(sender=sender_of(9), records=(rumour,)), 0)
    assert core.me == record_of(0) and core.get(peer_id_of(1)) == record_of(1)
    rumour = record_of(0, state=DEAD, incarnation=INCARNATION_LIMIT - 1)
    core.receive(Gossip(sender=sender_of(9), records=(rumour,)), 0)
    assert core.me.incarnation == INCARNATION_LIMIT and core.me.state is ALIVE
    out = core.update(0, meta=b"x")
    assert core.me.incarnation == INCARNATION_LIMIT
    assert "used up" in out.events[0].reason


@pytest.mark.parametrize(
    "facts",
    [
        {"peer_id": "a" * 31},
        {"peer_id": "G" * 32},
        {"boot": -1},
        {"boot": 2**63},
        {"incarnation": 2**63},
        {"name": "n" * 65},
        {"meta": bytes(2049)},
        {"address": "tcp://host"},
        {"address": "ipc:///tmp/x:1"},
        {"address": "tcp://" + "h" * 260 + ":1"},
        {"bulk_address": "nonsense"},
        {"accusers": (peer_id_of(1),)},
        {"state": SUSPECT, "accusers": tuple(sorted(peer_id_of(n) for n in range(9)))},
        {"state": SUSPECT, "accusers": (peer_id_of(1), peer_id_of(1))},
        {"state": SUSPECT, "accusers": ("x",)},
        {"attested": True},
    ],
)
def test_records_out_of_bounds_are_refused(facts: dict[str, object]) -> None:
    record_of(0)
    with pytest.raises(ValueError):
        record_of(0, **facts)


def test_messages_out_of_bounds_are_refused() -> None:
    many = tuple(record_of(number) for number in range(17))
    Gossip(sender=sender_of(0), records=many[:16])
    with pytest.raises(ValueError, match="17 records"):
        Gossip(sender=sender_of(0), records=many)
    PushPull(sender=sender_of(0), seq=1, reply=True, records=many)
    with pytest.raises(ValueError, match="1025 records"):
        PushPull(sender=sender_of(0), seq=1, reply=True, records=(record_of(0),) * 1025)
    with pytest.raises(ValueError, match="seq"):
        PushPull(sender=sender_of(0), seq=-1, reply=True)


def test_what_is_no_message_costs_an_error_and_changes_nothing() -> None:
    core = lone()
    with pytest.raises(RemoteProtocolError):
        core.receive("hello", 0)  # type: ignore[arg-type]
    assert core.members() == (record_of(0),)


def test_strangers_cannot_make_it_grow_without_bound() -> None:
    core = lone()
    for number in range(1, 5_000):
        core.receive(Gossip(sender=sender_of(9), records=(record_of(number, state=DEAD),)), number)
    assert len(core.members()) == 4_097
    core.check_invariants()
    assert core.get(peer_id_of(1)) is None and core.get(peer_id_of(4_999)) is not None


# Costs.


@pytest.mark.parametrize("size", [2, 4, 16, 64])
def test_idle_members_hardly_speak(size: int) -> None:
    net = Network(size)
    nodes = net.cluster(size)
    net.run(10_000)
    sends, sent_bytes = net.sends, net.sent_bytes
    net.run(20_000)
    assert (net.sends - sends) / 20 / size < 5  # a ping and an ack, twice a second
    assert (net.sent_bytes - sent_bytes) / 20 / size < 1_500
    idle = nodes[0].core
    assert len({idle.next_deadline_ms(net.now_ms), net.now_ms}) == 2


def test_an_idle_core_asks_for_few_ticks() -> None:
    net = Network(1)
    core = net.cluster(4)[0].core
    net.run(10_000)
    now_ms, ticks = net.now_ms, 0
    while now_ms < net.now_ms + 10_000:
        now_ms = core.next_deadline_ms(now_ms)
        for send in core.tick(now_ms).sends:
            if isinstance(send.message, Ping):  # everybody answers at once
                number = next(n for n in range(4) if peer_id_of(n) == send.peer_id)
                net.by_address[address_of(number)].core.receive(send.message, now_ms)
                for answer in net.by_address[address_of(number)].core.receive(send.message, now_ms).sends:
                    if answer.peer_id == core.me.peer_id:
                        core.receive(answer.message, now_ms)
        ticks += 1
    assert ticks <= 10 * 3


@pytest.mark.parametrize("seed", [1, 2])
def test_a_thousand_joins_and_leaves_leave_nothing_behind(seed: int) -> None:
    core = lone()
    now_ms = 0
    for cycle in range(1_000):
        now_ms += 1_000
        number = 1 + (cycle * seed) % 40
        for incarnation, state in ((2 * cycle, ALIVE), (2 * cycle + 1, LEFT)):
            said = record_of(number, incarnation=incarnation, state=state)
            core.receive(Gossip(sender=sender_of(9), records=(said,)), now_ms)
            core.tick(now_ms)
    core.check_invariants()
    assert len(core.members()) <= 62  # a minute's worth
