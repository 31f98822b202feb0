"""The reduction of compressed vectors among members in threads, over real gloo, and error feedback's two outcomes."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.train import reduction
from p2p_dmc.train.collective import CollectiveError, ring_bytes
from p2p_dmc.train.compression import Codec, codec
from p2p_dmc.train.exchange import Exchange
from p2p_dmc.train.reduction import ErrorFeedback, Reducer, cut, reduce_in

SCHEMES = ("bf16", "int8", "int4", "topk")
DEADLINE_S = 60
CODERS = [codec(scheme) for scheme in SCHEMES]
WORLDS = (2, 3, 4)


class Members:
    """Groups of gloo over loopback, one for each member, in this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        store = dist.HashStore()
        self.groups: list[Any] = [None] * world
        self.each(lambda rank: self.groups.__setitem__(rank, make(store, rank, world)))

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """What each member makes of it, or the error that it met."""
        results: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except CollectiveError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=[rank], daemon=True) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        return results

    def reduce(
        self, scheme: str, vectors: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Exchange]]:
        """Everybody's result, error and exchange; the vectors stay."""
        values = [vector.clone() for vector in vectors]
        errors = [torch.full_like(vector, 7.0) for vector in vectors]

        def work(rank: int) -> Exchange:
            exchange = Exchange(self.groups[rank], rank, self.world)
            reduce_in(exchange, codec(scheme), values[rank], errors[rank])
            return exchange

        return values, errors, self.each(work)


def make(store: Any, rank: int, world: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = datetime.timedelta(seconds=30)
    options._threads = 1
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, world, options)


@pytest.fixture(scope="module")
def members() -> dict[int, Members]:
    return {world: Members(world) for world in WORLDS}


class View:
    def __init__(self, world: int) -> None:
        self.world = world


class Grouped:
    """In place of a view's group: the members' own groups, and what fails."""

    def __init__(self, members: Members, rank: int) -> None:
        self.view, self._members, self._rank = View(members.world), members, rank
        self.fails = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._members.groups[self._rank].allreduce([tensor]).wait()
        self._fail()

    def exchange(self, work: Callable[[Exchange], None]) -> None:
        work(Exchange(self._members.groups[self._rank], self._rank, self.view.world))
        self._fail()

    def _fail(self) -> None:
        if self.fails:
            raise CollectiveError("a member is gone")


def made(world: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(world)]


def check(values: list[torch.Tensor], errors: list[torch.Tensor], vectors: list[torch.Tensor]) -> None:
    """The same bits on all; with the errors, the sum of all parts, but for the owners' few float32 additions."""
    assert all(torch.equal(values[0].view(torch.int32), other.view(torch.int32)) for other in values)
    assert all(torch.isfinite(one).all() for one in (*values, *errors))
    exact = sum(vector.double() for vector in vectors)
    kept = values[0].double() + sum(error.double() for error in errors)
    size = sum(vector.double().abs() for vector in vectors)
    assert bool(((exact - kept).abs() <= size * 2.0**-22).all())


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(max_examples=8, deadline=None)
@given(
    world=st.sampled_from(WORLDS),
    count=st.sampled_from([0, 1, 2, 3, 5, 255, 257, 1000, 4097, 20_001]),
    seed=st.integers(0, 99),
)
def test_all_have_the_same_bits_and_nothing_is_lost(
    members: dict[int, Members], scheme: str, world: int, count: int, seed: int
) -> None:
    vectors = made(world, count, seed)
    values, errors, exchanges = members[world].reduce(scheme, vectors)
    check(values, errors, vectors)
    assert sum(e.sent_bytes for e in exchanges) == sum(e.received_bytes for e in exchanges)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_stripes(members: dict[int, Members], scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "STRIPE", 1 << 13)
    monkeypatch.setattr(reduction, "LEAST_SEGMENT", 1 << 10)
    count = 150_001
    assert len(cut(count, codec(scheme), 3)) > 2 * reduction.LAG + 1
    vectors = made(3, count)
    values, errors, exchanges = members[3].reduce(scheme, vectors)
    check(values, errors, vectors)
    whole = codec(scheme).size_bytes(count)
    expected = ring_bytes(whole, 3) if codec(scheme).is_sum else 2 * whole
    assert all(abs(e.sent_bytes - expected) < 0.03 * expected + 2000 for e in exchanges)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_integers_that_need_no_rounding_sum_exactly(members: dict[int, Members], scheme: str) -> None:
    """One magnitude in all: then the scale is one, and there is nothing to leave out, nor to keep for later."""
    vectors = [torch.zeros(600) for _ in range(4)]
    for rank, vector in enumerate(vectors):
        vector[100 * rank : 100 * rank + 10] = 127.0 if scheme != "int4" else 7.0
    values, errors, _ = members[4].reduce(scheme, vectors)
    assert torch.equal(values[0], sum(vectors, torch.zeros(600)))
    assert not any(error.any() for error in errors)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_poisons_nobody(members: dict[int, Members], scheme: str) -> None:
    vectors = made(3, 3000)
    vectors[1][7], vectors[1][1500], vectors[2][2999] = float("nan"), float("inf"), 3.4e38
    vectors[0][2999], vectors[0][30] = 3.4e38, 1e-45
    values, errors, _ = members[3].reduce(scheme, vectors)
    assert all(torch.equal(values[0], other) for other in values)
    assert all(torch.isfinite(one).all() for one in (*values, *errors))
    assert float(values[0][1500]) > 2.0**125 and float(values[0][2999]) > 2.0**125


@pytest.mark.parametrize("scheme", SCHEMES)
def test_alone_nothing_is_rounded(scheme: str) -> None:
    (vector,) = made(1, 700)
    values, error = vector.clone(), torch.full_like(vector, 7.0)
    reduce_in(Exchange(None, 0, 1), codec(scheme), values, error)
    assert torch.equal(values, vector) and not error.any()


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 8_000_000),
    coder=st.sampled_from(CODERS),
    world=st.sampled_from([2, 3, 7, 64, 300]),
)
def test_stripes_and_segments_cover_the_vector_in_order(count: int, coder: Codec, world: int) -> None:
    cuts, width = cut(count, coder, world), coder.width
    edges = [edge for stripe in cuts for segment in stripe for edge in segment]
    assert edges[0] == 0 and edges[-1] == count and edges == sorted(edges)
    assert edges[1:-1:2] == edges[2:-1:2]
    assert all(edge % width == 0 or edge == count for edge in edges)
    assert all(len(stripe) == world for stripe in cuts)
    limit = max(2 * reduction.STRIPE, 2 * world * max(width, reduction.LEAST_SEGMENT))
    assert all(stripe[-1][1] - stripe[0][0] <= limit for stripe in cuts)


# -- error feedback -----------------------------------------------------------------------------------------------


class Together:
    """A few trainers' reducers, round after round."""

    def __init__(self, members: Members, exact: int = 0) -> None:
        self.members, self.exact = members, exact
        self.reducers = [Reducer() for _ in range(members.world)]
        self.groups = [Grouped(members, rank) for rank in range(members.world)]

    def round(self, scheme: str, deltas: list[torch.Tensor], weights: list[int]) -> list[Any]:
        """Each one's mean as applied, or the error."""

        def work(rank: int) -> torch.Tensor:
            values = deltas[rank] * float(weights[rank]) if weights[rank] else torch.zeros_like(deltas[rank])
            group: Any = self.groups[rank]
            moved = self.reducers[rank].reduce(group, scheme, values, sum(weights), self.exact)
            return values.div_(float(moved.divisor))

        return self.members.each(work)

    def settle(self, *, counted: bool) -> None:
        for reducer in self.reducers:
            reducer.feedback.settle(counted=counted)

    def owed(self) -> list[torch.Tensor | None]:
        return [reducer.feedback.owed for reducer in self.reducers]


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4"])
def test_what_was_applied_and_what_is_owed_are_all_that_was_brought(
    members: dict[int, Members], scheme: str
) -> None:
    together, applied, brought = Together(members[3]), torch.zeros(5000).double(), torch.zeros(5000).double()
    for number in range(6):
        deltas, weights = made(3, 5000, number), [[5, 3, 8], [4, 0, 4], [1, 1, 1]][number % 3]
        means = together.round(scheme, deltas, weights)
        together.settle(counted=True)
        assert all(torch.equal(means[0], other) for other in means)
        applied += means[0].double()
        brought += sum(w * d.double() for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    owed = sum(one.double() for one in together.owed() if one is not None)
    assert float((applied + owed - brought).abs().max()) < 1e-5
    assert float((applied - brought).abs().max()) > 1e-4  # there was something to feed back
    plain = together.round("none", made(3, 5000, 99), [1, 1, 1])  # as "auto" may choose: the debt is paid
    together.settle(counted=True)
    assert all(torch.equal(plain[0], other) for other in plain)
    assert not any(one is not None and one.any() for one in together.owed())
    applied += plain[0].double()
    brought += sum(d.double() for d in made(3, 5000, 99)) / 3
    assert float((applied - brought).abs().max()) < 1e-5


def test_who_owes_and_who_does_not_mean_the_same_sum(members: dict[int, Members]) -> None:
    """A round of "none" after coded ones, with a member that has just come and owes nothing."""
    together = Together(members[2])
    together.round("int8", made(2, 5000), [1, 1])
    together.settle(counted=True)
    together.reducers[1].feedback.forget()
    owed = together.owed()[0]
    assert owed is not None
    deltas = made(2, 5000, 1)
    expected = (3 * deltas[0].double() + deltas[1].double()) / 4 + owed.double()
    means = together.round("none", deltas, [3, 1])
    assert torch.equal(means[0], means[1])
    assert float((means[0].double() - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int4", "topk"])
def test_running_statistics_are_not_rounded(members: dict[int, Members], scheme: str) -> None:
    """A small variance beside large values must not come out below zero."""
    together, deltas, exact = Together(members[3], exact=5), made(3, 5000), []
    for delta in deltas:
        delta[-10:] *= 1000.0
        delta[-5:] = 1e-4
    for _ in range(2):
        means = together.round(scheme, deltas, [1, 1, 1])
        together.settle(counted=True)
        exact.append(means[0][-5:])
        assert all(torch.equal(means[0], other) for other in means)
    assert all(torch.allclose(one, torch.full((5,), 1e-4), rtol=1e-6) for one in exact)
    assert all(one is not None and one.any() and not one[-5:].any() for one in together.owed())


def test_topk_gives_part_of_its_error_up_each_round(members: dict[int, Members]) -> None:
    together, deltas = Together(members[2]), made(2, 9000)
    expected = [torch.zeros(9000) for _ in range(2)]
    for _ in range(3):
        means = together.round("topk", deltas, [1, 1])
        total = torch.zeros(9000)
        for rank in range(2):
            part, coder = deltas[rank] / 2 + expected[rank] * 0.95, codec("topk")
            payload = torch.empty(coder.size_bytes(9000), dtype=torch.uint8)
            coder.encode(part, payload, expected[rank])
            coder.add(payload, total)
        together.settle(counted=True)
        assert torch.equal(means[0], total) and torch.equal(means[1], total)
        assert all(torch.equal(a, b) for a, b in zip(together.owed(), expected, strict=True) if a is not None)


@pytest.mark.parametrize("counted", [False, True])
def test_both_outcomes_of_a_failed_round_are_kept_until_it_is_known(
    members: dict[int, Members], counted: bool
) -> None:
    """One member meets an error, as if the others had finished: what holds is what the next view says."""
    together = Together(members[3])
    together.round("int8", made(3, 4000), [1, 1, 1])
    together.settle(counted=True)
    before = [None if one is None else one.clone() for one in together.owed()]
    together.groups[1].fails = True
    results = together.round("int8", made(3, 4000, 1), [1, 2, 3])
    assert [isinstance(one, CollectiveError) for one in results] == [False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(together.owed(), before, strict=True))  # type: ignore[arg-type]
    together.settle(counted=counted)
    other = Together(members[3])
    other.round("int8", made(3, 4000), [1, 1, 1])
    other.settle(counted=True)
    if counted:
        other.round("int8", made(3, 4000, 1), [1, 2, 3])
        other.settle(counted=True)
    assert all(torch.equal(a, b) for a, b in zip(together.owed(), other.owed(), strict=True))  # type: ignore[arg-type]
    together.settle(counted=True)  # nothing is open: a second word changes nothing
    assert all(torch.equal(a, b) for a, b in zip(together.owed(), other.owed(), strict=True))  # type: ignore[arg-type]
    together.groups[1].fails = False
    again, apart = (one.round("int8", made(3, 4000, 2), [1, 1, 1]) for one in (together, other))
    assert torch.equal(again[0], apart[0])


def test_without_weight_only_the_debt_is_sent(members: dict[int, Members]) -> None:
    """A peer whose delta is not finite is given weight 0: of the delta nothing enters, not even times zero."""
    together = Together(members[2])
    together.round("int4", made(2, 3000), [1, 1])
    together.settle(counted=True)
    owed = together.owed()[1]
    assert owed is not None and owed.any()
    owed = owed.clone()
    deltas = [torch.zeros(3000), torch.full((3000,), float("nan"))]
    means = together.round("int4", deltas, [2, 0])
    together.settle(counted=True)
    left = together.owed()[1]
    assert left is not None and torch.isfinite(means[0]).all() and torch.isfinite(left).all()
    assert float(left.norm()) < float(owed.norm())


def test_forgetting_frees_the_memory_and_none_takes_none() -> None:
    feedback = ErrorFeedback()
    feedback.settle(counted=True)
    assert feedback.owed is None
    feedback.opening(torch.zeros(3)).fill_(2.0)
    assert feedback.owed is None
    feedback.settle(counted=True)
    assert feedback.owed is not None and feedback.owed.tolist() == [2.0] * 3
    feedback.opening(torch.zeros(3)).fill_(5.0)
    feedback.forget()
    feedback.settle(counted=True)
    assert feedback.owed is None


def test_plain_rounds_are_as_they_were(members: dict[int, Members]) -> None:
    together, deltas = Together(members[2]), made(2, 1000)
    moved = together.members.each(
        lambda rank: together.reducers[rank].reduce(
            together.groups[rank],  # type: ignore[arg-type]
            "none",
            deltas[rank],
            7,
        )
    )
    assert [tuple(one) for one in moved] == [(7, 4000, 4000)] * 2
    assert together.owed() == [None, None]
    assert torch.equal(deltas[0], sum(made(2, 1000), torch.zeros(1000)))
