"""Before `seed-dataset --append` compares: what this home lacks of the data set comes from the peers that have it.

A peer keeps the shards that are its own to keep, so whoever seeded a data set has not all of it for long. An agent that
stores nothing for others joins, fetches, and leaves again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from itertools import islice

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import NoAnswerError, ask
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.terminal import run_agent, say_contact
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Store
from p2p_dmc.data.versions import versions
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural

LEARN_S = 5.0
"""So long after the first contact peers have said which data sets they have."""
AT_ONCE = 8
"""Shards asked for at a time; more of each are on their way from several peers."""
SAY_EVERY_S = 30.0


def complete(names: Sequence[str], options: AgentOptions, home: Home, console: Console) -> None:
    """Have the newest version of each data set here as a whole, if there are peers that may have it.

    Raises UserError when there is no room, KeyboardInterrupt when somebody ends it.
    """
    seeds = options.seeds or tuple(home.known_peers())
    if not seeds:
        return
    said, store = _generations(seeds), Store(home.store_root, keep_staging=True)
    if not any(_is_lacking(name, said, store) for name in names):
        return
    done = False

    async def work(agent: Agent) -> int:
        nonlocal done
        await say_contact(agent, seeds, console)
        for name in names:
            if (manifest := await _learn(agent, name, said)) is not None:
                await _fetch(agent, manifest, console)
        done = True
        return 0

    broken = console.output.on_broken
    try:
        run_agent(dataclasses.replace(options, stays=False), home, console, work)
    finally:
        console.output.on_broken = broken
    if not done:
        raise KeyboardInterrupt
    home.lock()


def _generations(seeds: Sequence[str]) -> dict[str, int] | None:
    """Of the newest version of each data set that peers know; None when none answers yet."""
    try:
        known = ask(seeds, "status", timeout_s=1.0)["datasets"]
    except NoAnswerError:
        return None
    newest: dict[str, int] = {}
    for one in known:
        newest[one["name"]] = max(one["generation"], newest.get(one["name"], 0))
    return newest


def _is_lacking(name: str, said: dict[str, int] | None, store: Store) -> bool:
    """Whether shards of the newest version are not here, or peers have a newer one."""
    mine = store.by_name(name)
    if mine is None or len(store.holdings(mine.digest)) < len(mine.shards):
        return True
    return said is not None and said.get(name, 0) > mine.generation


async def _learn(agent: Agent, name: str, said: dict[str, int] | None) -> Manifest | None:
    """The newest version that anybody has, once that is known, or there was time to hear of it."""

    def newest() -> Manifest | None:
        return next(iter(versions(agent.data.manifests(), name)), None)

    loop = asyncio.get_running_loop()
    until_s = loop.time() + LEARN_S
    while loop.time() < until_s:
        manifest = newest()
        if manifest is not None and said is not None and manifest.generation >= said.get(name, 0):
            break
        await asyncio.sleep(0.1)
    return newest()


async def _fetch(agent: Agent, manifest: Manifest, console: Console) -> None:
    """Until all shards are here and verified."""
    loop, dataset = asyncio.get_running_loop(), manifest.digest
    missing = set(range(len(manifest.shards))) - agent.store.holdings(dataset)
    total, said_s = sum(manifest.shard_sizes[shard] for shard in missing), loop.time()
    if missing:
        console.say(
            f"{plural(len(missing), 'shard')} of data set {manifest.name!r} to be fetched for the comparison"
        )
    with console.progress(f"fetching what is missing of {manifest.name!r}") as progress:
        while missing:
            if agent.data.full:
                raise UserError(
                    f"--append compares the input with all of {manifest.name!r}, and there is no room for "
                    f"{plural(len(missing), 'shard')} that other peers have; make room, or raise --capacity"
                )
            there = sorted(missing & agent.data.reachable(dataset))
            for shard in islice(there, AT_ONCE):
                agent.data.want(dataset, shard, _nothing)
            if not there and loop.time() - said_s > LEARN_S:
                said_s = loop.time() + SAY_EVERY_S
                console.say(
                    f"waiting for {plural(len(missing), 'shard')} of {manifest.name!r} that no peer has which is in "
                    "contact (start one that has them, or Ctrl-C)"
                )
            await asyncio.sleep(0.1)
            missing = {shard for shard in missing if not agent.data.usable(dataset, shard)}
            progress(total - sum(manifest.shard_sizes[shard] for shard in missing), total)


def _nothing() -> None:
    """Called when a shard has come, which is looked at anyway."""
