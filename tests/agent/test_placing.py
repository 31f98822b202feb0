"""Placing in the background: the agent goes on meanwhile, and what is out of date is not used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from p2p_dmc.agent import placing
from p2p_dmc.agent.known import Known
from p2p_dmc.agent.placing import Facts, Placing, planned
from p2p_dmc.core.placement import StoringPeer, placement
from p2p_dmc.core.replication import Plan
from p2p_dmc.core.shard_set import ShardSet
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from tests.data.helpers import seed_tree, small_tree

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("placing")
    return seed_tree(
        small_tree(folder / "tree", folders=2, samples=8), Store(folder / "store"), max_shard_size=10_000
    )


def peers(*names: str) -> tuple[StoringPeer, ...]:
    return tuple(StoringPeer(peer_id=name) for name in sorted(names))


class Placed:
    """One data set that is placed as its facts change."""

    def __init__(self, manifest: Manifest) -> None:
        self.known = Known(manifest=manifest)
        self.facts: Facts = (peers("a", "b", "c"), {})
        self.plans: list[Plan] = []
        self.placing = Placing(lambda known: self.facts, self.take)

    def take(self, known: Known, plan: Plan) -> None:
        known.take(plan.placed)
        self.plans.append(plan)

    def follow(self) -> None:
        self.placing.follow(self.known, self.plans[-1] if self.plans else None)

    async def until(self, true: Callable[[], bool]) -> None:
        while not true():
            await asyncio.sleep(0.001)

    def is_right(self) -> bool:
        plan, manifest = self.plans[-1], self.known.manifest
        whole = Plan(placement(manifest.shard_digests, self.facts[0], manifest.replicas), self.facts[1])
        same = [plan.keepers(i) == whole.keepers(i) for i in range(len(manifest.shards))]
        return all(same) and plan.placed.digest() == whole.placed.digest()


def test_a_small_data_set_is_placed_at_once_and_only_when_something_changed(manifest: Manifest) -> None:
    one = Placed(manifest)
    for facts in (
        (peers("a", "b", "c"), {}),
        (peers("a", "b"), {}),
        (peers("a", "b"), {"a": ShardSet.of([0], len(manifest.shards))}),
        (peers("a", "b"), {"a": ShardSet.of([0, 1], len(manifest.shards))}),
        (peers("a", "b"), {}),
    ):
        one.facts = facts
        one.follow()
        count = len(one.plans)
        one.follow()
        assert len(one.plans) == count and one.is_right()
    assert len(one.plans) == 5


def test_a_large_one_is_placed_in_a_thread_and_a_stale_result_is_dropped(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "AT_ONCE", 0)
    begun: list[tuple[Facts, bool]] = []
    go_on = threading.Semaphore(0)

    def slow(manifest: Manifest, placed: object, before: object, facts: Facts) -> Plan:
        begun.append((facts, threading.current_thread() is threading.main_thread()))
        assert go_on.acquire(timeout=DEADLINE_S)
        return planned(manifest, placed, before, facts)  # type: ignore[arg-type]

    monkeypatch.setattr(placing, "planned", slow)

    async def work() -> None:
        one = Placed(manifest)
        one.follow()
        await one.until(lambda: len(begun) == 1)
        one.follow()  # it is under way
        one.facts = (peers("a", "b", "c", "d"), {})
        one.follow()
        assert one.plans == [] and len(begun) == 1  # the loop is free all the while
        go_on.release()
        await one.until(lambda: len(begun) == 2)
        assert one.plans == []  # what came out was out of date
        go_on.release()
        await one.until(lambda: len(one.plans) == 1)
        assert one.is_right() and not any(is_main for _, is_main in begun)
        one.facts = (peers("b", "d"), {"b": ShardSet.of([], len(manifest.shards))})
        one.follow()
        go_on.release()
        await one.until(lambda: len(one.plans) == 2)
        assert one.is_right()
        await one.placing.close()

    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))
