"""Events and rounds in words."""

from __future__ import annotations

from typing import Any

import pytest

from p2p_dmc.observe.narrator import Narrator, labels, plural, printable, short

ALICE, BOB, CAROL = ("a" * 32, "b" * 32, "c" * 32)


def event(kind: str, peer_id: str = ALICE, **facts: Any) -> dict[str, Any]:
    return {"time": 1.0, "event": kind, "peer_id": peer_id, "run": "train", **facts}


def member(
    peer_id: str, name: str, state: str, old: str | None = "ALIVE", reason: str = "said by itself"
) -> dict[str, Any]:
    return event("member", peer_id, name=name, state=state, old=old, reason=reason, address="tcp://h:1")


def round_line(time_s: float, samples: int, **facts: Any) -> dict[str, Any]:
    line = {"time": time_s, "view_epoch": 2, "round": 7, "members": 3, "epoch": 0, "tau": 4, "loss": 0.25}
    return line | {"samples_round": samples, "bytes_sent": 2048} | facts


@pytest.fixture
def narrator() -> Narrator:
    return Narrator({ALICE: "alice", BOB: "bob"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (member(CAROL, "carol", "ALIVE", old=None), "carol (cccccccc) is here, at tcp://h:1"),
        (member(BOB, "bob", "SUSPECT", reason="no answer"), "bob (bbbbbbbb) does not answer (no answer)"),
        (member(BOB, "bob", "ALIVE", old="SUSPECT"), "bob (bbbbbbbb) answers again"),
        (
            member(BOB, "bob", "DEAD", reason="refused by its host"),
            "bob (bbbbbbbb) is lost (refused by its host)",
        ),
        (member(BOB, "bob", "LEFT"), "bob (bbbbbbbb) has left"),
        (event("view", view_epoch=3, members=[ALICE, BOB]), "view 3: 2 peers, alice, bob"),
        (event("view", view_epoch=4, members=[CAROL]), "view 4: 1 peer, cccccccc"),
        (
            event("view", view_epoch=4, members=[ALICE], learners=[BOB]),
            "view 4: 1 peer, alice; bob catching up",
        ),
        (event("trainer_lost", BOB, reason="killed by SIGKILL"), "bob trains no longer (killed by SIGKILL)"),
        (event("trainer_ready"), "trainer of run 'train' is ready"),
        (event("adopted", lineage=[2, 9], seconds=0.25), "caught up with view 2 round 9 in 0.2 s"),
        (
            event("round_failed", round=9, reason="reset\nby peer"),
            "round 9 broke off (reset); it is done again",
        ),
        (event("diverged", odd=[BOB, CAROL]), "at the same round another state is held by bob, cccccccc"),
        (event("join_refused", BOB, reason="tau is 4 here"), "bob is refused (tau is 4 here)"),
        (event("stop_asked", reason="dmc-peer stop"), "run 'train' is asked to stop (dmc-peer stop)"),
        (event("assignment", skipped=12, epoch=1), "12 samples of epoch 2 will be skipped"),
        (
            event("bad_shard", shard="0" * 32, source=BOB),
            "shard 000000000000 arrived damaged from bob; another peer is asked",
        ),
    ],
)
def test_an_event_in_words(narrator: Narrator, line: dict[str, Any], said: str) -> None:
    assert narrator.event(line) == [said]


@pytest.mark.parametrize(
    "kind", ["fetched", "checkpoint", "started", "run_over", "trainer_exit", "of a later version"]
)
def test_what_nobody_wants_to_read(narrator: Narrator, kind: str) -> None:
    assert narrator.event(event(kind)) == []


def test_takeovers_of_one_view_are_one_line_per_victim(narrator: Narrator) -> None:
    for victim, heir, samples in ((BOB, ALICE, 10), (BOB, CAROL, 5), (CAROL, ALICE, 1), (BOB, ALICE, 20)):
        one = event("takeover", **{"from": victim, "to": heir}, samples=samples, shard="ff", first="x")
        assert narrator.event(one) == []
    assert narrator.event(event("view", view_epoch=5, members=[ALICE])) == [
        "35 samples of bob are taken over: alice takes 30, cccccccc takes 5",
        "1 samples of cccccccc are taken over: alice takes 1",
        "view 5: 1 peer, alice",
    ]
    assert narrator.pending() == []


def test_names_that_several_peers_have_come_with_their_ids(narrator: Narrator) -> None:
    narrator.event(member(CAROL, "bob", "ALIVE", old=None))
    assert [narrator.name(p) for p in (ALICE, BOB, CAROL, "d" * 32)] == [
        "alice",
        "bob (bbbbbbbb)",
        "bob (cccccccc)",
        "dddddddd",
    ]
    members = [{"peer_id": p, "name": n} for p, n in ((ALICE, "alice"), (BOB, "bob"), (CAROL, "bob"))]
    assert labels(members) == {ALICE: "alice", BOB: "bob bbbbbbbb", CAROL: "bob cccccccc"}


def test_a_large_view_is_one_line_of_bounded_length(narrator: Narrator) -> None:
    [said] = narrator.event(event("view", view_epoch=1, members=[f"{i:032x}" for i in range(100)]))
    assert said.startswith("view 1: 100 peers, ") and said.endswith(" and 92 more") and len(said) < 150


def test_skipped_samples_are_said_once(narrator: Narrator) -> None:
    said = [narrator.event(event("assignment", skipped=n, epoch=0)) for n in (0, 3, 3, 4)]
    assert said == [[], ["3 samples of epoch 1 will be skipped"], [], ["1 sample of epoch 1 will be skipped"]]


def rate(text: str) -> str:
    return text.partition(" samples/s")[0].split()[-1]


def test_the_rate_counts_neither_the_start_nor_what_is_long_past(narrator: Narrator) -> None:
    """The first round's samples were worked on before the first look; ten quick seconds do not hide a slow now."""
    assert rate(narrator.round(round_line(100.0, 5000))) == "-"
    assert rate(narrator.round(round_line(101.0, 64))) == "64"
    assert rate(narrator.round(round_line(103.0, 64))) == "43"
    for second in range(1, 40):
        said = narrator.round(round_line(103.0 + second, 1000))
    assert rate(said) == "1,000"
    assert rate(narrator.round(round_line(442.0, 1000))) == "3"


def test_a_round_in_words(narrator: Narrator) -> None:
    assert narrator.round(round_line(1.0, 64)) == (
        "view 2 round 7  peers 3  epoch 1  tau 4  loss 0.2500  - samples/s  sent 2.0 KiB a round"
    )
    assert "loss -  " in narrator.round(round_line(1.0, 64, loss=None))


def test_nothing_from_the_network_reaches_the_terminal_as_a_command() -> None:
    assert printable("a\x1b[2Jb\r\tc\nd\udc80é") == "a\\x1b[2Jb\\x0d\\x09c\nd\\xdc80é"
    assert short(" first\nsecond") == "first"
    assert len(short("x" * 1000)) == 160
    assert (plural(1, "peer"), plural(0, "peer")) == ("1 peer", "0 peers")
