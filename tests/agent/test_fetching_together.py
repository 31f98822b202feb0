"""Data services that fetch the same shards at the same time from one that has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import fetching as fetching_module
from p2p_dmc.agent.limits import RateLimit
from p2p_dmc.data.store import Store
from tests.agent.test_datasets import empty, net_of, run, settled
from tests.data.helpers import make_tree, seed_tree

__all__ = ["net_of"]  # a fixture


@pytest.mark.parametrize("shard_bytes", [60_000, 1_000_000])
def test_a_lone_seeder_sends_little_more_than_once_what_three_are_to_hold(
    tmp_path: Path, net_of: Any, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(fetching_module, "LOOK_S", 0.02)
    monkeypatch.setattr(fetching_module, "AHEAD_BYTES", 60_000)  # of shards as small as these
    store = Store(tmp_path / "seed")
    tree = make_tree(tmp_path / "tree", {f"{i:03d}.bin": 3000 + i for i in range(200)})
    manifest = seed_tree(tree, store, max_shard_size=shard_bytes, replicas=3)

    async def work() -> None:
        async with net_of() as net:
            seeder = net.join(1, store, weight=0)
            seeder.server._limit = RateLimit(400_000)
            three = [net.join(i, empty(tmp_path, i)) for i in (2, 3, 4)]
            for node in three:
                node.client._timeout_s = (
                    30.0  # what three have asked for takes longer than the tests' time-out
                )
            await net.until(lambda: all(n.data.fetching() for n in three) or settled(net, manifest))
            while not settled(net, manifest):
                await net.step()
            assert all(n.data.held(manifest.digest) == set(range(len(manifest.shards))) for n in three)
            assert (
                seeder.server.sent_bytes < 2 * manifest.total_bytes
            )  # by itself it would send three times as much
            assert all(n.server.sent_bytes > manifest.total_bytes // 10 for n in three)

    run(work())
