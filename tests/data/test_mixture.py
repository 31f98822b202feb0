"""Mixtures: what their shards stand for, their identity, and that every sample of every pass counts exactly once."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import permutations
from statistics import pstdev
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.braids import in_turn, weave
from p2p_dmc.core.ledger import Ledger, check_exact, sample_index, sample_permutation
from p2p_dmc.data import mixture as module
from p2p_dmc.data.manifest import Manifest, ShardEntry
from p2p_dmc.data.mixture import MAX_PARTS, MAX_PASSES, Mixture, Part, mixture_of
from p2p_dmc.errors import UserError
from tests.core.test_assignment import Run


def data_set(name: str, *counts: int, classes: tuple[str, ...] = ()) -> Manifest:
    """Of shards with so many samples."""
    shards = tuple(
        ShardEntry(f"{name}{i}".encode().rjust(16, b".")[-16:], 4096 * count, count)
        for i, count in enumerate(counts)
    )
    return Manifest(
        name=name, mode="file", replicas=2, seed=0, fields=("txt",), classes=classes, shards=shards
    )


WEB, CODE = data_set("web", 5, 4, 3), data_set("code", 2, 6)
MIXED = Mixture((Part(WEB, 1), Part(CODE, 3)))


def test_its_shards_are_the_parts_once_for_each_pass() -> None:
    assert [p.manifest.name for p in MIXED.parts] == ["code", "web"]
    assert MIXED.sample_counts == (2, 6, 2, 6, 2, 6, 5, 4, 3)
    assert (len(MIXED), MIXED.samples) == (9, 36)
    places = [MIXED.where(shard) for shard in range(9)]
    assert places == [(CODE, 0, 0), (CODE, 1, 0)] * 3 + [(WEB, 0, 0), (WEB, 1, 0), (WEB, 2, 0)]
    assert MIXED.shard_digest(5) == CODE.shard_digests[1] and MIXED.shard_digest(8) == WEB.shard_digests[2]
    for shard in (-1, 9):
        with pytest.raises(IndexError):
            MIXED.where(shard)
    assert MIXED.name == "3 x code + 1 x web"


def test_the_identity_is_the_same_on_every_machine() -> None:
    """Golden vector: if it changes, peers and checkpoints disagree about what has been seen."""
    assert WEB.digest.hex() == "024adf270341652f17f04cf18cbc64b9"
    assert CODE.digest.hex() == "8de150d6b3e416250437c21d3d803a8c"
    assert MIXED.digest.hex() == "2fec60f3243ee4651e7974171da85406"
    assert sample_permutation(MIXED.digest, 7, 2, 1, 6) == (3, 0, 5, 1, 4, 2)
    assert sample_permutation(MIXED.digest, 7, 2, 3, 6) == (4, 2, 0, 1, 3, 5), (
        "another pass over the same shard"
    )


def test_the_identity_is_of_the_parts_and_passes_in_whatever_order() -> None:
    third = data_set("books", 4)
    parts = [Part(WEB, 1), Part(CODE, 3), Part(third, 2)]
    assert len({Mixture(tuple(order)).digest for order in permutations(parts)}) == 1
    others = [
        (Part(WEB, 1), Part(CODE, 3)),
        (Part(WEB, 3), Part(CODE, 1)),
        (Part(WEB, 1), Part(CODE, 2)),
        (Part(WEB, 1), Part(replace(CODE, seed=1), 3)),
        (Part(CODE, 3),),
        (Part(CODE, 1),),
        (Part(WEB, 1),),
        tuple(parts),
    ]
    assert len({Mixture(other).digest for other in others}) == len(others)


def test_one_data_set_once_is_that_data_set() -> None:
    alone = Mixture.of(CODE)
    assert not alone.is_mixed and (alone.digest, alone.name) == (CODE.digest, "code")
    assert alone.sample_counts == CODE.sample_counts and alone.where(1) == (CODE, 1, 0)
    held = frozenset({1})
    assert alone.spread([held]) is held
    assert Mixture((Part(CODE, 2),)).is_mixed


def test_a_shard_is_there_when_the_one_that_it_stands_for_is() -> None:
    assert MIXED.spread([frozenset({1}), frozenset({0, 2})]) == {1, 3, 5, 6, 8}
    assert MIXED.spread([frozenset(), frozenset()]) == frozenset()


def samples_of(mixed: Mixture, shard: int) -> list[tuple[str, int, int]]:
    """(data set, shard, index) of each sample of a shard of the mixture, by their places in it."""
    manifest, at, first = mixed.where(shard)
    return [(manifest.name, at, first + index) for index in range(mixed.sample_counts[shard])]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 9),
    st.integers(1, 9),
    st.data(),
)
@settings(max_examples=60)
def test_every_sample_of_every_part_comes_in_every_pass(
    parts: list[tuple[list[int], int]], least: int, shards: int, data: st.DataObject
) -> None:
    made = [Part(data_set(f"part{i}", *counts), passes) for i, (counts, passes) in enumerate(parts)]
    with patch.multiple(module, LEAST_SAMPLES=least, SHARDS=shards):
        mixed = Mixture(tuple(data.draw(st.permutations(made))))
        assert len(mixed) == len(mixed.sample_counts)
    assert Counter(sample for shard in range(len(mixed)) for sample in samples_of(mixed, shard)) == Counter(
        {
            (p.manifest.name, at, index): p.passes
            for p in made
            for at, count in enumerate(p.manifest.sample_counts)
            for index in range(count)
        }
    )
    assert mixed.samples == sum(mixed.sample_counts) == sum(p.samples for p in made)
    most = max(least, -(-mixed.samples // shards))
    assert not mixed.is_mixed or max(mixed.sample_counts) <= most
    assert len(mixed) <= shards + sum(p.passes * len(p.manifest.shards) for p in made)
    sets = [data.draw(st.frozensets(st.integers(0, len(p.manifest.shards) - 1))) for p in mixed.parts]
    held = {p.manifest.name: one for p, one in zip(mixed.parts, sets, strict=True)}
    assert mixed.spread(sets) == {
        i for i in range(len(mixed)) if mixed.where(i).shard in held[mixed.where(i).manifest.name]
    }


def test_long_shards_are_cut_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SAMPLES", 3)
    cut = Mixture((Part(WEB, 1), Part(CODE, 3)))
    assert cut.sample_counts == (2, 3, 3) * 3 + (2, 3, 2, 2, 3)
    assert cut.where(2) == cut.where(5) == (CODE, 1, 3) and cut.where(10) == (WEB, 0, 2)
    assert cut.spread([frozenset({1}), frozenset({0})]) == {1, 2, 4, 5, 7, 8, 9, 10}
    assert cut.digest != MIXED.digest, "another order"
    assert Mixture.of(WEB).sample_counts == WEB.sample_counts


def shares_of_web(mixed: Mixture, window: int) -> list[float]:
    """In each so many samples in a row that one peer alone consumes, in a few orders."""
    found = []
    for seed in range(5):
        ledger = Ledger.start(mixed.digest, mixed.sample_counts, seed, 1)
        names = [mixed.where(shard).manifest.name for shard, _ in in_turn(weave(ledger.remaining()))]
        starts = range(0, len(names) - window + 1, window)
        found += [names[at : at + window].count("web") / window for at in starts]
    return found


@pytest.mark.parametrize("long", [40, 640])
def test_the_shares_are_met_along_the_epoch(long: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/datasets.md has it, also when one part's shards are sixteen times as long as the other's."""
    parts = (
        Part(data_set("web", *[40] * 256), 1),
        Part(data_set("code", *[long] * (10_240 // long)), 1),
    )
    shares = shares_of_web(Mixture(parts), 4096)
    assert min(shares) >= 0.4 and max(shares) <= 0.6
    assert 0.10 < pstdev(shares_of_web(Mixture(parts), 256)) < 0.12
    monkeypatch.setattr(module, "SHARDS", 1)
    uncut = shares_of_web(Mixture(parts), 4096)
    assert long == 40 or max(uncut) - min(uncut) > 0.5, "else cutting them shows nothing"


def test_classes_are_those_of_all_parts() -> None:
    cats, dogs = data_set("one", 4, classes=("cat", "cow")), data_set("two", 4, classes=("ant", "cat"))
    assert Mixture((Part(cats, 1), Part(dogs, 2))).classes == ("ant", "cat", "cow")


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((), f"a mixture of 0 data sets; 1 to {MAX_PARTS} can be mixed"),
        (tuple(Part(data_set(f"p{i}", 1), 1) for i in range(17)), "a mixture of 17 data sets; 1 to 16"),
        (
            (Part(WEB, 1), Part(replace(WEB, seed=1), 1)),
            "data set 'web' is in the mixture twice; name one version",
        ),
        ((Part(WEB, 0),), f"0 passes over data set 'web' an epoch; give 1 to {MAX_PASSES}"),
        ((Part(WEB, 1001),), "1001 passes over data set 'web'"),
        ((Part(WEB, True),), "True passes over data set 'web'"),
        ((Part(WEB, 1.5),), "1.5 passes over data set 'web'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_mixture(parts: tuple[Part, ...], said: str) -> None:
    with pytest.raises(UserError) as refused:
        Mixture(parts)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_too_many_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SHARDS", 9)
    assert len(Mixture((Part(WEB, 1), Part(CODE, 3)))) == 9
    with pytest.raises(
        UserError, match=r"2 x web .*has 12 shards an epoch, more than 9; let parts come less often"
    ):
        Mixture((Part(WEB, 2), Part(CODE, 3)))


def test_made_from_digests_that_are_known() -> None:
    known = {m.digest: m for m in (WEB, CODE)}
    assert mixture_of([(WEB.digest, 1), (CODE.digest, 3)], known.get) == MIXED
    with pytest.raises(UserError, match=r"data set (78){16} is not known here; seed it"):
        mixture_of([(WEB.digest, 1), (b"x" * 16, 1)], known.get)


# -- runs with churn --------------------------------------------------------------------------------------------------


class MixedRun(Run):
    """A member holds a shard in all its passes or in none; now and then all are stopped, or lose power."""

    def __init__(self, rng: random.Random) -> None:
        names = [data_set(f"d{i}", *(rng.randint(1, 9) for _ in range(rng.randint(1, 4)))) for i in range(3)]
        self.mixture = Mixture(tuple(Part(m, rng.randint(1, 3)) for m in names[: rng.randint(2, 3)]))
        super().__init__(rng, self.mixture.digest, self.mixture.sample_counts)
        self.resumed_within = 0
        self.checkpoint()

    def holdings(self) -> frozenset[int]:
        parts = self.mixture.parts
        return self.mixture.spread(
            frozenset(s for s in range(len(p.manifest.shards)) if self.rng.random() < 0.5) for p in parts
        )

    def checkpoint(self) -> None:
        """Ledger and rounds of this moment are on disk."""
        self._saved = self.ledger.to_bytes(), len(self.counted)

    def resume(self) -> None:
        """All go on from the newest checkpoint: later rounds and all claims are lost."""
        data, rounds = self._saved
        self.ledger, self.counted, self.claims = Ledger.from_bytes(data), self.counted[:rounds], {}
        self.resumed_within += self.ledger.progress()[0] > 0


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_every_sample_counts_once_in_each_pass_whatever_crashes(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_SAMPLES", 4)
    resumed = failed = 0
    for seed in range(first, first + 20):
        run = MixedRun(random.Random(seed))
        while not run.ledger.done:
            run.go_on()
            if run.rng.random() < 0.4:
                run.checkpoint()
            if not run.ledger.done and run.resumed_within < 20 and run.rng.random() < 0.2:
                run.resume()
        assert check_exact(run.counts, 2, run.counted) == []
        _check_samples(run)
        resumed, failed = resumed + run.resumed_within, failed + run.failed_rounds
    assert resumed and failed


def _check_samples(run: MixedRun) -> None:
    """As samples rather than positions: each of a data set as often as it has passes, once in each of them."""
    for epoch in range(2):
        seen: Counter[tuple[str, int, int]] = Counter()
        passes: set[tuple[int, int]] = set()
        for of, s in run.counted:
            if of != epoch:
                continue
            for position in range(s.lo, s.hi):
                ledger, count = run.ledger, run.counts[s.shard]
                index = sample_index(ledger.dataset_digest, ledger.seed, epoch, s.shard, count, position)
                assert (s.shard, index) not in passes
                passes.add((s.shard, index))
                seen[samples_of(run.mixture, s.shard)[index]] += 1
        assert seen == {
            (p.manifest.name, at, index): p.passes
            for p in run.mixture.parts
            for at, count in enumerate(p.manifest.sample_counts)
            for index in range(count)
        }
