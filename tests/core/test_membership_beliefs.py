"""One Membership core alone, told things: what it believes, what it answers, and where it stops."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.member_table import join, precedence
from p2p_dmc.core.membership import (
    Ack,
    Gossip,
    MemberRecord,
    Membership,
    MembershipSettings,
    MemberState,
    Nack,
    Ping,
    PingReq,
    PushPull,
)
from p2p_dmc.core.membership_messages import INCARNATION_LIMIT, MAX_PROMISED
from p2p_dmc.errors import RemoteProtocolError
from tests.core.gossip_network import address_of, peer_id_of, record_of, sender_of

ALIVE, SUSPECT, DEAD, LEFT = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT
LAN = MembershipSettings.lan()


def lone(number: int = 0, seeds: tuple[str, ...] = (), **facts: object) -> Membership:
    return Membership(record_of(number, **facts), seeds, LAN, random.Random(7), 0)


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


def test_who_asks_with_an_old_idea_of_me_gets_my_record() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(9),)), 0)
    for now_ms in range(0, 10_000, 50):  # until the news of my start is stale
        core.tick(now_ms)
    core.update(now_ms, meta=b"new")
    for later_ms in range(now_ms, now_ms + 10_000, 50):
        core.tick(later_ms)
    for incarnation, carried in ((0, True), (1, False)):
        ping = Ping(sender=sender_of(9), seq=1, peer_id=core.me.peer_id, boot=1, incarnation=incarnation)
        answers = [send.message for send in core.receive(ping, later_ms).sends]
        assert [core.me in answer.records for answer in answers if isinstance(answer, Ack)] == [carried]


def test_a_suspect_hears_of_it_from_whoever_pings_it() -> None:
    core = lone()
    suspect = record_of(1, state=SUSPECT, accusers=(peer_id_of(9),))
    out = core.receive(Gossip(sender=sender_of(9), records=(record_of(9), suspect)), 0)
    (ping,) = [send.message for send in out.sends if isinstance(send.message, Ping)]
    assert ping.peer_id == suspect.peer_id and ping.records[0] == suspect


def test_a_helper_pings_for_another_and_says_what_came_of_it() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(9), record_of(1))), 0)
    core.tick(0)
    wanted = PingReq(
        sender=sender_of(9),
        seq=77,
        peer_id=peer_id_of(1),
        boot=1,
        incarnation=0,
        address=address_of(1),
        timeout_ms=200,
    )
    for answered in (True, False):
        (ping,) = core.receive(wanted, 0).sends
        assert isinstance(ping.message, Ping) and ping.address == address_of(1)
        if answered:
            ack = Ack(sender=sender_of(1), seq=ping.message.seq, peer_id=peer_id_of(1), boot=1)
            (relayed,) = core.receive(ack, 0).sends
            assert isinstance(relayed.message, Ack) and relayed.message.peer_id == peer_id_of(1)
            assert relayed.address == address_of(9) and relayed.message.seq == 77
    said = [send for now_ms in range(0, 500, 10) for send in core.tick(now_ms).sends]
    nacks = [(send.address, send.message.seq) for send in said if isinstance(send.message, Nack)]
    assert nacks == [(address_of(9), 77)]


def test_nacks_keep_a_prober_confident_and_their_absence_does_not() -> None:
    for nacked in (True, False):
        core = lone()
        facts = tuple(record_of(number) for number in (1, 2, 3, 9))
        core.receive(Gossip(sender=sender_of(9), records=facts), 0)
        for now_ms in range(0, 1_200, 10):
            for send in core.tick(now_ms).sends:
                if isinstance(send.message, PingReq) and nacked:
                    number = next(n for n in (1, 2, 3, 9) if peer_id_of(n) == send.peer_id)
                    core.receive(Nack(sender=sender_of(number), seq=send.message.seq), now_ms)
        assert core.members() != (core.me, *facts)  # the probe did fail
        assert (core.health == 0) is nacked


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


def test_one_that_slept_judges_nobody_by_the_time_it_slept() -> None:
    core = lone()
    suspect = record_of(1, state=SUSPECT, accusers=(peer_id_of(9),))
    core.receive(Gossip(sender=sender_of(9), records=(record_of(9), record_of(2), suspect)), 0)
    for now_ms in range(0, 1_001, 50):
        core.tick(now_ms)
    woken_ms = 30_000
    for number in (9, 2):  # what had queued up meanwhile
        core.receive(Gossip(sender=sender_of(number)), woken_ms)
    out = core.tick(woken_ms)
    assert not out.events, "judged at once"
    assert core.health >= 1
    core.tick(woken_ms + 100)
    record = core.get(peer_id_of(1))
    assert record is not None and record.state is SUSPECT
    events = [e for ms in range(100, 10_000, 50) for e in core.tick(woken_ms + ms).events]
    assert DEAD in [event.new for event in events if event.peer_id == suspect.peer_id], "and never after"


def test_an_earlier_life_is_fenced_and_told() -> None:
    new = lone()
    new.receive(Gossip(sender=sender_of(1, boot=5), records=(record_of(1, boot=5),)), 0)
    stranger = record_of(2)
    out = new.receive(Gossip(sender=sender_of(1, boot=4), records=(stranger,)), 10)
    assert new.get(stranger.peer_id) is None, "believed a ghost"
    (told,) = [send.message for send in out.sends]
    assert told.records == (record_of(1, boot=5),)


def test_the_dead_are_tried_now_and_then_even_without_seeds() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1, state=DEAD),)), 0)
    tried = [
        send.address
        for now_ms in range(0, 3 * LAN.reclaim_dead_ms + 1_000, 50)
        for send in core.tick(now_ms).sends
        if isinstance(send.message, PushPull)
    ]
    assert tried.count(address_of(1)) == 3


def test_who_was_heard_is_the_present_boot_itself() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1), record_of(9))), 10)
    assert core.last_heard_ms(peer_id_of(1)) is None
    core.receive(Gossip(sender=sender_of(1)), 20)
    assert core.last_heard_ms(peer_id_of(1)) == 20 and core.last_heard_ms(peer_id_of(9)) == 10
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1, boot=2),)), 30)
    assert core.last_heard_ms(peer_id_of(1)) is None


def heard_saying(core: Membership, *promised: tuple[str, int], boot: int = 1) -> dict[str, int]:
    core.receive(Gossip(sender=replace(sender_of(1, boot=boot), promised=promised)), 20)
    return core.last_promised(peer_id_of(1))


def test_how_new_its_promises_are_is_what_the_present_boot_said_last() -> None:
    core = lone()
    assert core.last_promised(peer_id_of(1)) == {}
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1),)), 10)
    assert heard_saying(core, ("r", 3), ("s", 4)) == {"r": 3, "s": 4}
    assert heard_saying(core, ("r", 5)) == {"r": 5}
    assert heard_saying(core, ("r", 4)) == {"r": 5}, "it came late, over a connection that broke"
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1, boot=2),)), 30)
    assert core.last_promised(peer_id_of(1)) == {}
    assert heard_saying(core, ("r", 9)) == {}, "of a former boot"
    assert heard_saying(core, ("r", 2), boot=2) == {"r": 2}
    core.check_invariants()


def test_every_message_tells_how_new_the_speakers_promises_are() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1), record_of(9))), 0)
    incarnation = core.me.incarnation
    core.promised("s", 1)
    core.promised("r", 2)
    core.promised("s", 3)
    asked = Ping(sender=sender_of(1), seq=1, peer_id=core.me.peer_id, boot=1, incarnation=0)
    wanted = PushPull(sender=sender_of(1), seq=2, reply=False)
    helped = PingReq(
        sender=sender_of(1),
        seq=3,
        peer_id=peer_id_of(9),
        boot=1,
        incarnation=0,
        address=address_of(9),
        timeout_ms=10,
    )
    sends = [send for message in (asked, wanted, helped) for send in core.receive(message, 1).sends]
    for now_ms in range(2, 3_000, 50):
        sends += core.tick(now_ms).sends
    assert {type(send.message) for send in sends} == {Ping, PingReq, Ack, Nack, Gossip, PushPull}
    assert {send.message.sender.promised for send in sends} == {(("r", 2), ("s", 3))}
    assert core.me.incarnation == incarnation, "it is no fact of the record"


def test_of_too_many_runs_those_that_changed_last_are_told() -> None:
    core = lone()
    for number in range(MAX_PROMISED):
        core.promised(f"{number:02}", 1)
    core.promised("00", 2)
    core.promised("zz", 1)
    (send,) = core.receive(PushPull(sender=sender_of(1), seq=2, reply=False), 1).sends[:1]
    told = dict(send.message.sender.promised)
    assert len(told) == MAX_PROMISED and told["00"] == 2 and "01" not in told and "zz" in told


@pytest.mark.parametrize(
    "promised",
    [
        (("b", 1), ("a", 1)),
        (("a", 1), ("a", 2)),
        (("a", -1),),
        (("a", 2**63),),
        (("a" * 257, 1),),
        tuple((f"{number:02}", 1) for number in range(MAX_PROMISED + 1)),
    ],
)
def test_promises_are_told_in_order_and_within_bounds(promised: tuple[tuple[str, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"promise|run name"):
        replace(sender_of(1), promised=promised)


def test_a_probe_that_fails_does_not_accuse_who_spoke_up_meanwhile() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1),)), 0)
    started_ms = next(
        now_ms
        for now_ms in range(0, 2_000, 10)
        if any(isinstance(send.message, Ping) for send in core.tick(now_ms).sends)
    )
    newer = record_of(1, incarnation=1)
    core.receive(Gossip(sender=sender_of(9), records=(newer,)), started_ms + 300)
    for now_ms in range(started_ms + 300, started_ms + 600, 10):
        core.tick(now_ms)
    assert core.health == 1, "the probe did not fail"
    assert core.get(peer_id_of(1)) == newer


def test_news_with_nobody_to_hear_it_keeps_nobody_awake() -> None:
    core = lone()
    core.update(0, meta=b"x")
    now_ms = ticks = 0
    while now_ms < 10_000:
        now_ms = core.next_deadline_ms(now_ms)
        core.tick(now_ms)
        ticks += 1
    assert ticks < 30


# Limits.


def test_an_accusation_at_the_limit_is_believed_by_nobody() -> None:
    core = lone()
    core.receive(Gossip(sender=sender_of(9), records=(record_of(1),)), 0)
    for number in (0, 1):
        rumour = record_of(number, state=DEAD, incarnation=INCARNATION_LIMIT)
        assert core.receive(Gossip(sender=sender_of(9), records=(rumour,)), 0).events == ()
    assert core.me == record_of(0) and core.health == 0 and core.get(peer_id_of(1)) == record_of(1)
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
