"""Versions of a data set on several peers: both are held, what they share comes once, and a run keeps to its own."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent import entering, run_files
from p2p_dmc.agent.bulk import Found
from p2p_dmc.agent.entering import OtherPeer, pinned_version
from p2p_dmc.agent.jobs import Jobs
from p2p_dmc.data.appending import plan_versions
from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture, Part
from p2p_dmc.data.seeding import Plan
from p2p_dmc.data.store import Store
from p2p_dmc.wire.messages import BulkKind, BulkRequest
from tests.agent.helpers import peer, run_meta
from tests.agent.test_datasets import copy, damage, empty, net_of, run, seeded
from tests.agent.test_run_files import READY
from tests.data.helpers import make_tree

__all__ = ["net_of", "seeded"]  # fixtures


def appended(tmp_path: Path, store: Store, **sizes: int) -> Manifest:
    """The next version, written to the store."""
    new = sizes or {"a": 3000, "b": 9000}
    make_tree(tmp_path / "tree", {f"new/{name}.txt": size for name, size in new.items()})
    [plan] = plan_versions(scan(tmp_path / "tree"), store, name="small", max_shard_size=10_000)
    assert isinstance(plan, Plan)
    return plan.write(store, None)


def test_peers_hold_both_versions_and_fetch_what_is_new(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    shards = frozenset(range(len(first.shards)))

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
            await net.until(lambda: two.store.datasets() and two.data.held(first.digest) == shards)
            await net.until(lambda: two.data.fetching() == 0)
            fetched = len(two.events("fetched"))
            second = appended(tmp_path, store)
            one.data.add(second)
            added = len(second.shards) - len(first.shards)
            await net.until(lambda: len(two.data.held(second.digest)) == len(second.shards))
            await net.until(lambda: two.data.fetching() == 0)
            assert len(two.events("fetched")) == fetched + added
            assert two.data.held(first.digest) == shards and two.data.conflict is None
            for i in shards:
                assert os.path.samefile(two.store.path(first.digest, i), two.store.path(second.digest, i))
            assert two.data.by_name("small") == one.data.by_name("small") == second
            assert two.data.by_name(f"small@{first.digest.hex()[:12]}") == first
            three = net.join(3, empty(tmp_path, 3))
            await net.until(lambda: set(three.store.datasets()) == {first.digest, second.digest})
            assert three.data.by_name("small") == second

    run(work())


def test_a_name_means_the_newest_version_that_is_whole(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded

    async def work() -> None:
        async with net_of() as net:
            second = appended(tmp_path, store)
            lacking = empty(tmp_path, 2)
            lacking.add_manifest(second)
            two = net.join(2, lacking)
            assert two.data.by_name("small") == second  # there is no other
            two.alive = False
            three = net.join(3, copy(tmp_path, 3, store, first))
            three.store.add_manifest(second)
            three.data.add(second)
            assert len(three.data.held(second.digest)) == len(first.shards) < len(second.shards)
            assert three.data.by_name("small") == first
            net.join(1, store)
            await net.until(lambda: three.data.by_name("small") == second)

    run(work())


def test_two_that_follow_one_version_are_two_data_sets_of_one_name(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    other = copy(tmp_path, 2, store, first)
    mine, theirs = appended(tmp_path, store), appended(tmp_path, other, c=500)
    assert mine.generation == theirs.generation == 1 and mine.digest != theirs.digest

    async def work() -> None:
        async with net_of() as net:
            one, two = net.join(1, store), net.join(2, other)
            await net.until(lambda: one.data.conflict is not None and two.data.conflict is not None)
            await net.rest(3.0)
            assert set(one.store.datasets()) == {first.digest, mine.digest}
            assert set(two.store.datasets()) == {first.digest, theirs.digest}
            assert len(one.events("name_clash")) == 1

    run(work())


# -- a run keeps to its version -------------------------------------------------------------------------------------


class Begun:
    """A run as a peer knows it, and an agent that has several versions."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, manifests: list[Manifest]) -> None:
        self.folder, self.name = folder, "train"
        self.services = SimpleNamespace(data=self)
        self.manifests = {one.digest: one for one in manifests}
        self.others: list[OtherPeer] = []
        monkeypatch.setattr(entering, "others", lambda services, run: tuple(self.others))

    def manifest(self, dataset: bytes) -> Manifest | None:
        return self.manifests.get(dataset)

    @property
    def pinned(self) -> str | None:
        return pinned_version(cast(Any, self), "small")


def test_a_run_that_is_on_record_here_goes_on_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    begun = Begun(tmp_path / "run", monkeypatch, [first, appended(tmp_path, store)])
    assert begun.pinned is None
    twelve = first.digest.hex()[:12]
    run_files.save_run(begun.folder, fingerprint=[["data set", f"small {twelve}"], ["epochs", "3"]])
    assert begun.pinned == f"small@{twelve}"
    run_files.save_run(begun.folder, fingerprint=[["data set", f"another {twelve}"]])
    assert begun.pinned is None  # the script names another one: the run's fingerprint refuses it
    mixed = Mixture((Part(first, 2), Part(replace(first, name="another"), 1)))
    parts = run_files.KnownPart.all_of(mixed)
    pairs = run_files.fingerprint(READY, mixed.name, "majority", "auto", "wait", parts)
    run_files.save_run(begun.folder, fingerprint=pairs)
    assert begun.pinned == f"small@{twelve}"


def test_a_newcomer_takes_the_version_of_the_run_that_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    begun = Begun(tmp_path / "run", monkeypatch, [first, appended(tmp_path, store)])

    def says(**facts: Any) -> None:
        begun.others = [OtherPeer(peer_id=peer(9), meta=run_meta(**facts))]

    says(history=b"", dataset=first.digest)
    assert begun.pinned is None  # it has not begun
    says(history=b"h" * 16, dataset=b"")
    assert begun.pinned is None
    says(history=b"h" * 16, dataset=first.digest)
    assert begun.pinned == f"small@{first.digest.hex()}"
    says(history=b"h" * 16, dataset=b"u" * 16)
    assert begun.pinned == f"small@{(b'u' * 16).hex()}"  # nothing is known of it yet: it is waited for
    begun.manifests[b"u" * 16] = replace(first, name="another")
    assert begun.pinned is None
    says(history=b"h" * 16, dataset=b"u" * 16 + first.digest)  # it mixes two
    assert begun.pinned == f"small@{first.digest.hex()}"
    says(history=b"h" * 16, dataset=b"v" * 16 + first.digest)
    assert begun.pinned == f"small@{first.digest.hex()}"
    says(history=b"h" * 16, dataset=b"v" * 16 + b"u" * 16)
    assert begun.pinned == f"small@{(b'v' * 16).hex()}"


def test_with_versions_to_choose_from_the_seeds_are_heard_first(seeded: tuple[Store, Manifest]) -> None:
    _, first = seeded
    second = replace(first, generation=1, origin=first.digest, parent=first.digest)
    membership = SimpleNamespace(seed_contacted=False)
    agent = SimpleNamespace(
        journal=SimpleNamespace(listeners=[]),
        data=SimpleNamespace(by_name={"one": first, "several": second}.get),
        options=SimpleNamespace(seeds=("tcp://127.0.0.1:1",)),
        membership=membership,
        runs={},
    )
    jobs = Jobs(cast(Any, agent))
    assert jobs._version("train", "one") == first and jobs._version("train", "none") is None
    assert jobs._version("train", "several") is None
    membership.seed_contacted = True
    assert jobs._version("train", "several") == second
    membership.seed_contacted = False
    agent.options.seeds = ()
    assert jobs._version("train", "several") == second


# -- files with two names -------------------------------------------------------------------------------------------


def test_who_meets_two_versions_at_once_fetches_what_they_share_once(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    second = appended(tmp_path, store)

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            one.data.add(first)
            one.data.add(second)
            two = net.join(2, empty(tmp_path, 2))
            await net.until(lambda: {first.digest, second.digest} == set(two.store.datasets()))
            for version in (first, second):
                await net.until(lambda d=version.digest: two.data.under_replicated(d) == 0)
                await net.until(lambda d=version.digest: one.data.under_replicated(d) == 0)
            await net.until(lambda: two.data.fetching() == 0)
            assert len(two.events("fetched")) == len(second.shards)
            for i in range(len(first.shards)):
                assert os.path.samefile(two.store.path(first.digest, i), two.store.path(second.digest, i))

    run(work())


def knowing(net: Any, tmp_path: Path, store: Store, *versions: Manifest) -> tuple[Any, Any]:
    """A peer that holds these versions, and one that knows them and holds nothing."""
    one, two = net.join(1, store), net.join(2, empty(tmp_path, 2))
    for version in versions:
        one.data.add(version)
        two.store.add_manifest(version)
        two.data.add(version)
    return one, two


def test_what_comes_for_another_version_while_it_waits_for_its_turn_is_not_fetched(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest], caplog: pytest.LogCaptureFixture
) -> None:
    store, first = seeded
    second = appended(tmp_path, store)

    async def work() -> None:
        async with net_of() as net:
            _, two = knowing(net, tmp_path, store, first, second)
            await net.until(lambda: two.data.reachable(second.digest))
            fetching = two.data._fetching
            fetching._admit = lambda: None  # type: ignore[method-assign]
            fetching.start((second.digest, 0), urgent=False)
            await net.until(lambda: bool(fetching._queue))
            came: list[int] = []
            two.data.want(first.digest, 0, lambda: came.append(0))
            await net.until(lambda: bool(came))
            del fetching._admit  # type: ignore[method-assign]
            fetching._admit()
            await net.until(lambda: two.data.usable(second.digest, 0))
            await net.until(lambda: (second.digest, 0) not in fetching)
            assert [r for r in caplog.records if r.levelname == "ERROR"] == []
            assert os.path.samefile(two.store.path(first.digest, 0), two.store.path(second.digest, 0))

    run(work())


def test_what_is_on_its_way_for_another_version_and_wanted_at_once_comes_once(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    second = appended(tmp_path, store)

    async def work() -> None:
        async with net_of() as net:
            one, two = knowing(net, tmp_path, store, first, second)
            await net.until(lambda: two.data.reachable(first.digest) and two.data.reachable(second.digest))
            go_on, asked = asyncio.Event(), []

            async def slowly(request: BulkRequest) -> Found:
                asked.append((request.digest, request.part, request.name))
                if len(asked) > 1:
                    await go_on.wait()
                return await one.data.provide_shard(request)

            one.server.provide(BulkKind.SHARD, slowly)
            fetching = two.data._fetching
            fetching.start((first.digest, 0), urgent=False)
            await net.until(lambda: len(asked) > 1)
            came: list[int] = []
            two.data.want(second.digest, 0, lambda: came.append(0))
            await net.until(
                lambda: fetching._receipts[first.digest, 0].plan.urgent
            )  # somebody waits for these bytes
            go_on.set()
            await net.until(lambda: bool(came))
            await net.until(lambda: (first.digest, 0) not in fetching and (second.digest, 0) not in fetching)
            assert two.data.usable(first.digest, 0) and two.data.usable(second.digest, 0)
            zero = {(first.digest, 0), (second.digest, 0)}
            assert {(d, part) for d, part, _ in asked if (d, part) in zero} == {(first.digest, 0)}

    run(work())


def test_a_damaged_file_is_told_of_by_each_version_that_had_it(
    tmp_path: Path, net_of: Any, seeded: tuple[Store, Manifest]
) -> None:
    store, first = seeded
    second = appended(tmp_path, store)

    async def work() -> None:
        async with net_of() as net:
            one = net.join(1, store)
            one.data.add(first)
            one.data.add(second)
            damage(store, first, 0)
            assert not store.verify(first.digest, 0)
            await net.step()
            for version in (first, second):
                assert 0 not in one.data.copies(version.digest)[one.id].there
                assert 0 not in one.data.reachable(version.digest)

    run(work())
