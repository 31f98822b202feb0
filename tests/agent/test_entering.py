"""How a ready trainer gets into a view, from what the others say of the run."""

from __future__ import annotations

from dataclasses import replace

from p2p_dmc.agent.entering import Entrance, OtherPeer, Step
from p2p_dmc.wire.messages import RunMeta

STILL_MS, RETRY_MS = 700, 500
NEW = RunMeta(
    name="train",
    boot=1,
    history=b"",
    view_epoch=0,
    ready=True,
    fingerprint=b"same",
    samples=0,
    quorum="majority",
    backend="auto",
    on_lost="wait",
)
BEGUN = replace(NEW, history=b"h" * 16, samples=64)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def looks(mine: RunMeta, *others: RunMeta, min_peers: int = 1, seed_known: bool = True) -> Step:
    """What peer "m" does once the others ("a", "b", ...) have said the same for a while."""
    clock = Clock()
    entrance = Entrance(min_peers, STILL_MS, RETRY_MS, clock)
    peers = [OtherPeer(peer_id=name, meta=meta) for name, meta in zip("abcdef", others, strict=False)]
    entrance.step(mine, "m", peers, seed_known)
    clock.now_s += 2.0
    return entrance.step(mine, "m", peers, seed_known)


def test_all_that_are_ready_found_together() -> None:
    assert looks(NEW, NEW, replace(NEW, ready=False)) == Step(found=("a", "m"))


def test_nobody_founds_before_a_seed_has_answered_or_too_few_are_ready() -> None:
    assert not looks(NEW, seed_known=False).found
    assert not looks(NEW, NEW, min_peers=3).found


def test_a_standing_view_is_asked() -> None:
    assert looks(NEW, replace(BEGUN, view_epoch=3)).ask == ("a",)


def test_a_run_that_pauses_elsewhere_is_not_founded_anew() -> None:
    """The only trainer so far has died and is starting again: its samples are not to be trained twice."""
    for paused in (replace(BEGUN, ready=False), replace(BEGUN, fingerprint=b"other")):
        step = looks(NEW, paused)
        assert step.ask == ("a",) and not step.found and "has begun it" in step.waiting


def test_it_goes_on_with_those_who_have_begun_it() -> None:
    assert looks(NEW, BEGUN).found == ("a", "m")
    assert looks(BEGUN, replace(BEGUN, ready=False)).found == ("m",), "its quorum decides, not this"


def test_a_history_in_which_nothing_is_committed_is_no_reason_to_wait() -> None:
    assert looks(NEW, replace(BEGUN, samples=0, ready=False)).found == ("m",)


def test_of_two_histories_one_without_samples_yields() -> None:
    other = replace(BEGUN, history=b"o" * 16)
    assert looks(replace(BEGUN, samples=0), other).yield_to == b"o" * 16
    step = looks(BEGUN, other)
    assert not step.found and "another history" in step.waiting
