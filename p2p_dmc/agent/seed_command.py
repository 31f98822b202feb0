"""seed-dataset: cut what is there into shards, hold and serve them."""

from __future__ import annotations

import asyncio
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import NoAnswerError, ask
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.terminal import (
    is_loopback,
    locked,
    log_to,
    network_options,
    parse_seeds,
    run_agent,
    say_contact,
)
from p2p_dmc.core.membership import Role
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural
from p2p_dmc.wire.transport import split_address

if TYPE_CHECKING:
    from p2p_dmc.data.manifest import Manifest
    from p2p_dmc.data.store import Store

CLASH_WINDOW_S = 5.0
"""After the first contact, a name that others use for another data set ends the newcomer's command, not theirs."""


def seed_dataset(*, path: Path, debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer seed-dataset`: exit code."""
    home = Home(options["home"])
    with Console(as_json) as console, locked(home):
        network = network_options(options["listen"], options["advertise"], options["insecure"], console)
        log_to(home, debug)
        seeds = parse_seeds(options["seed"])
        manifest, is_new = _shard(home, path, options, console)
        is_newcomer = bool(seeds or home.known_peers())
        agent_options = AgentOptions(
            home=home.root,
            name=options["peer_name"] or socket.gethostname(),
            seeds=seeds,
            role=Role.STORE,
            capacity_bytes=options["capacity"],
            domain=options["domain"],
            stays=not options["leave_when_replicated"],
            **network,
        )

        async def work(agent: Agent) -> int:
            agent.data.add(manifest)
            _print_seeding(agent, manifest, console, options["insecure"])
            agent.spawn(say_contact(agent, seeds, console))
            return await _serve(agent, manifest, options["leave_when_replicated"], is_newcomer, console)

        try:
            _refuse_taken_name(manifest, seeds)
            return run_agent(agent_options, home, console, work)
        except NameTakenError:
            if is_new:
                shutil.rmtree(home.store_root / manifest.digest.hex(), ignore_errors=True)
            raise


class NameTakenError(UserError):
    """The peers that this one joins use the name for another data set."""


def _shard(home: Home, path: Path, options: dict[str, Any], console: Console) -> tuple[Manifest, bool]:
    """Scan, plan, write; the manifest, which the store has published, and whether it was not there before."""
    from p2p_dmc.data.formats import scan
    from p2p_dmc.data.sharding import plan_shards, write_shards
    from p2p_dmc.data.store import Store

    name = options["name"] or path.resolve().name
    store = Store(home.store_root, options["capacity"])
    found = scan(path, stem=options["stem"], include=options["include"], depth=options["depth"])
    console.say(console.scan_line(path, found))
    plan = plan_shards(
        found, mode=options["mode"], max_shard_size=options["max_shard_size"], order=options["order"], seed=0
    )
    _refuse_other_shape(store, name, len(found.samples), len(plan))
    before = store.datasets()
    with console.progress(f"writing {plural(len(plan), 'shard')}") as progress:
        manifest = write_shards(
            plan,
            store,
            scan=found,
            name=name,
            mode=options["mode"],
            replicas=options["replicas"],
            seed=0,
            progress=progress,
        )
    return manifest, manifest.digest not in before


def _refuse_other_shape(store: Store, name: str, samples: int, shards: int) -> None:
    """Without writing a shard: a data set of this home that has the name and cannot be the same."""
    other = store.by_name(name)
    if other is not None and (len(other), len(other.shards)) != (samples, shards):
        raise UserError(
            f"{name!r} is data set {other.digest.hex()} of this home, with {plural(len(other), 'sample')} in "
            f"{plural(len(other.shards), 'shard')}, not {samples} in {shards}; give this one another --name"
        )


def _refuse_taken_name(manifest: Manifest, seeds: tuple[str, ...]) -> None:
    """Ask the seeds, if one of them is there already, whether the name means something else to them."""
    if not seeds:
        return
    try:
        known = ask(seeds, "status", timeout_s=1.0)["datasets"]
    except NoAnswerError:
        return  # a seed that comes later is heard by the agent
    for other in known:
        if other["name"] == manifest.name and other["dataset"] != manifest.digest.hex():
            raise NameTakenError(
                f"{manifest.name!r} is data set {other['dataset']} of the peers at {', '.join(seeds)}, and "
                f"{manifest.digest.hex()} here; seed this one under another --name"
            )


def _print_seeding(agent: Agent, manifest: Manifest, console: Console, insecure: bool) -> None:
    line = f"dmc-peer join {'--insecure ' if insecure else ''}{agent.address} train.py"
    console.fact(
        "seeding",
        peer_id=agent.peer_id,
        name=manifest.name,
        dataset=manifest.digest.hex(),
        samples=len(manifest),
        fields=list(manifest.fields),
        shards=len(manifest.shards),
        replicas=manifest.replicas,
        address=agent.address,
        join=line,
    )
    console.say(
        f"data set {manifest.name!r} {manifest.digest.hex()[:12]}: {plural(len(manifest), 'sample')} with fields "
        f"{', '.join(manifest.fields)} in {plural(len(manifest.shards), 'shard')}, "
        f"{plural(manifest.replicas, 'replica')} wanted"
    )
    console.say(f"serving at {agent.address}; on each machine that trains, run:\n\n    {line}\n")
    if is_loopback(split_address(agent.address)[0]):
        console.say(
            "only this machine can reach that; --insecure lets others in, on a network that you trust"
        )


async def _serve(
    agent: Agent, manifest: Manifest, leave_when_replicated: bool, is_newcomer: bool, console: Console
) -> int:
    """Until somebody ends it, every shard is elsewhere (if that is wanted), or the name turns out to be taken."""
    loop = asyncio.get_running_loop()
    contact_s = None
    while not (leave_when_replicated and agent.data.replicated_elsewhere()):
        if contact_s is None and agent.membership is not None and agent.membership.seed_contacted:
            contact_s = loop.time()
        has_just_come = is_newcomer and contact_s is not None and loop.time() - contact_s < CLASH_WINDOW_S
        if agent.data.conflict and has_just_come:
            agent.data.forget(manifest.digest)  # nobody takes it under this name: leaving waits for no copies
            raise NameTakenError(agent.data.conflict)
        await asyncio.sleep(0.2)
    console.say("every shard has its holders elsewhere; leaving")
    return 0
