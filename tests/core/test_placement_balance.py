"""How much each peer holds, against the closed forms: balance, weights, and the two traps of more than one replica."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.placement import Placement, StoringPeer, placement
from tests.core.placement_oracle import digests, peers_of


def inclusion(peers: list[StoringPeer], replicas: int) -> dict[str, Fraction]:
    """Probability that each peer holds a shard, where there are at least as many domains as replicas.

    The cheapest of a domain is an exponential draw whose rate is the domain's weight, so domains are chosen one after
    the other in proportion to their weights among those that are left; which peer of the domain it is depends on
    nothing else.
    """
    weight_of: dict[str, int] = {}
    for peer in peers:
        weight_of[peer.domain or peer.peer_id] = weight_of.get(peer.domain or peer.peer_id, 0) + peer.weight
    chosen = dict.fromkeys(weight_of, Fraction(0))
    for sequence in permutations(weight_of, replicas):
        left, likely = sum(weight_of.values()), Fraction(1)
        for domain in sequence:
            likely *= Fraction(weight_of[domain], left)
            left -= weight_of[domain]
        for domain in sequence:
            chosen[domain] += likely
    return {
        peer.peer_id: chosen[peer.domain or peer.peer_id]
        * Fraction(peer.weight, weight_of[peer.domain or peer.peer_id])
        for peer in peers
    }


def assert_held(result: Placement, likely: dict[str, Fraction]) -> None:
    """Each peer holds its share, within 4.5 standard deviations: shards are placed independently of each other."""
    s = len(result)
    for peer_id, probability in likely.items():
        sigma = math.sqrt(s * probability * (1 - probability))
        assert abs(len(result.shards_of(peer_id)) - float(s * probability)) <= 4.5 * sigma, peer_id


@pytest.mark.parametrize(
    "domains",
    [[], [f"d{i % 4}" for i in range(16)], [f"d{i % 8}" for i in range(16)]],
    ids=["flat", "4", "8"],
)
def test_equal_peers_hold_the_same_within_the_closed_form(domains: list[str]) -> None:
    """Coefficient of variation sqrt((N-R)/(S*R)); largest over mean about 1 + CV*sqrt(2 ln N). Equal domains change
    neither.
    """
    n, r, s = 16, 3, 4096
    result = placement(digests(s), peers_of([1] * n, domains), r)
    loads = np.array([len(result.shards_of(peer.peer_id)) for peer in result.peers])
    assert loads.sum() == s * r
    variation = math.sqrt((n - r) / (s * r))
    assert loads.std() / loads.mean() == pytest.approx(variation, rel=0.5)
    assert loads.max() / loads.mean() < 1 + 2 * variation * math.sqrt(2 * math.log(n))
    assert_held(result, dict.fromkeys([peer.peer_id for peer in result.peers], Fraction(r, n)))


def test_primaries_are_proportional_to_weight() -> None:
    """With domains too: the first of all is the first of its domain."""
    weights, s = [1, 2, 3, 10, 16], 20_000
    for domains in ([], ["a", "b", "a", "b", "a"]):
        result = placement(digests(s), peers_of(weights, domains), 3)
        primaries = [result.holders(i)[0] for i in range(s)]
        for peer in result.peers:
            share = Fraction(peer.weight, sum(weights))
            sigma = math.sqrt(s * share * (1 - share))
            assert abs(primaries.count(peer.peer_id) - float(s * share)) < 4.5 * sigma


# -- the weight trap --------------------------------------------------------------------------------------------------


def test_the_exact_inclusion_probabilities_of_the_text_book_case() -> None:
    likely = inclusion(peers_of([1, 1, 2, 4]), 2)
    assert [round(float(p), 4) for p in likely.values()] == [0.3095, 0.3095, 0.5714, 0.8095]


@pytest.mark.parametrize(
    ("weights", "replicas"),
    [([1, 1, 2, 4], 2), ([1, 1, 1, 9], 2), ([1, 1, 1, 1000], 3), ([3, 4, 5, 6, 7], 4), ([1, 2, 3], 3)],
)
def test_copies_follow_the_exact_inclusion_probabilities_not_the_weights(
    weights: list[int], replicas: int
) -> None:
    """No peer holds two copies of a shard: the heavy get less than their weight's share, the light more."""
    peers = peers_of(weights)
    likely = inclusion(peers, replicas)
    assert sum(likely.values()) == replicas
    assert_held(placement(digests(20_000), peers, replicas), likely)
    heaviest = Fraction(replicas * max(weights), sum(weights))
    assert list(likely.values())[-1] < heaviest or len(weights) == replicas


@settings(max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=3, max_size=6), st.data())
def test_who_has_more_weight_holds_more_but_not_in_proportion(
    weights: list[int], data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(2, len(weights) - 1))
    likely = list(inclusion(peers_of(weights), replicas).values())
    by_weight = sorted(zip(weights, likely, strict=True))
    for (w1, p1), (w2, p2) in pairwise(by_weight):
        assert p1 <= p2 and p1 * w2 >= p2 * w1  # a copy for each unit of weight: fewer for the heavier


# -- the domain trap --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domains", "replicas"),
    [
        (["a", "b", "b", "b", "b"], 2),  # two domains, two replicas: the one peer of a holds everything
        (["a", "b", "b", "c", "c", "c"], 2),
        (["a", "a", "a", "a", "", ""], 2),
        (["a", "a", "b", "b", "c", ""], 3),
    ],
)
def test_copies_follow_the_domains_not_the_peers_weights(domains: list[str], replicas: int) -> None:
    peers = peers_of([1 + i % 3 for i in range(len(domains))], domains)
    likely = inclusion(peers, replicas)
    assert sum(likely.values()) == replicas
    result = placement(digests(20_000), peers, replicas)
    assert_held(result, likely)
    if len(set(domains)) == replicas and "" not in domains:
        assert len(result.shards_of("peer-000")) == len(result)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_copies_are_in_as_many_domains_as_there_are(replicas: int) -> None:
    """Repeats only where there are fewer domains than replicas."""
    domains = ["a", "a", "a", "b", "b", "c"]
    result = placement(digests(500), peers_of([1, 2, 3, 4, 5, 6], domains), replicas)
    domain_of = {peer.peer_id: peer.domain for peer in result.peers}
    for i in range(len(result)):
        holders = result.holders(i)
        assert len(set(holders)) == replicas
        assert len({domain_of[peer_id] for peer_id in holders}) == min(3, replicas)
