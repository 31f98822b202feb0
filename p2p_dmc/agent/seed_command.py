"""seed-dataset: cut what is there into shards, hold and serve them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import NoAnswerError, ask
from p2p_dmc.agent.completing import complete
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.rehearsal import known_peers, say_plan
from p2p_dmc.agent.terminal import (
    is_loopback,
    locked,
    log_to,
    network_options,
    parse_seeds,
    run_agent,
    say_contact,
)
from p2p_dmc.config import format_size
from p2p_dmc.core.membership import Role
from p2p_dmc.data.manifest import HELD_OUT, MAX_NAME_CHARACTERS
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural
from p2p_dmc.wire.transport import split_address

if TYPE_CHECKING:
    from p2p_dmc.data.found import Scan
    from p2p_dmc.data.manifest import Manifest
    from p2p_dmc.data.readers.base import Spool
    from p2p_dmc.data.seeding import Plan
    from p2p_dmc.data.store import Store

CLASH_WINDOW_S = 5.0
"""After the first contact, a name that others use for another data set ends the newcomer's command, not theirs."""


def seed_dataset(*, path: Path, debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer seed-dataset`: exit code."""
    if options["dry_run"]:
        return _dry_run(path, options, as_json)
    home = Home(options["home"])
    with Console(as_json) as console, locked(home):
        network = network_options(options["listen"], options["advertise"], options["insecure"], console)
        log_to(home, debug)
        seeds = parse_seeds(options["seed"])
        agent_options = AgentOptions(
            home=home.root,
            name=options["peer_name"] or socket.gethostname(),
            seeds=seeds,
            role=Role.STORE,
            capacity_bytes=options["capacity"],
            max_upload=options["max_upload"],
            max_download=options["max_download"],
            domain=home.domain(options["domain"]),
            stays=not options["leave_when_replicated"],
            **network,
        )
        if options["append"]:
            name = _name(path, options)
            held_out = [f"{name}{HELD_OUT}"] if options["val_fraction"] is not None else []
            complete([name, *held_out], agent_options, home, console)
        manifests, new = _shard(home, path, options, console)
        is_newcomer = bool(seeds or home.known_peers())

        async def work(agent: Agent) -> int:
            for manifest in manifests:
                agent.data.add(manifest)
            _print_seeding(agent, manifests, console, options["insecure"])
            agent.spawn(say_contact(agent, seeds, console))
            return await _serve(agent, manifests, options["leave_when_replicated"], is_newcomer, console)

        try:
            _refuse_taken_names(manifests, seeds)
            return run_agent(agent_options, home, console, work)
        except NameTakenError:
            for manifest in new:
                shutil.rmtree(home.store_root / manifest.digest.hex(), ignore_errors=True)
            raise


class NameTakenError(UserError):
    """The peers that this one joins use the name for another data set."""


def _shard(
    home: Home, path: Path, options: dict[str, Any], console: Console
) -> tuple[list[Manifest], list[Manifest]]:
    """Scan, plan, write; the manifests, which the store has published, and those that were not there before."""
    from p2p_dmc.data.manifest import Manifest
    from p2p_dmc.data.readers.base import Spool
    from p2p_dmc.data.store import Store

    store = Store(home.store_root, options["capacity"], keep_staging=True)
    before = store.datasets()
    manifests = []
    plans: list[Plan | Manifest]
    with store.spool_folder() as folder, Spool(folder, store.free_bytes) as spool:
        if options["append"]:
            plans = _look_for_new(path, options, store, spool, console)
        else:
            plans = [*_look(path, options, spool, console)]
        for plan in plans:
            if not isinstance(plan, Manifest) and plan.base is None:
                _refuse_other_shape(store, plan)
        for plan in plans:
            if isinstance(plan, Manifest):
                console.say(f"data set {plan.name!r} {plan.digest.hex()[:12]} has all of it already")
                manifests.append(plan)
            else:
                if plan.base is not None:
                    version, count = plan.base.digest.hex()[:12], plural(plan.sample_count, "new sample")
                    console.say(f"{count} for data set {plan.name!r}, whose newest version is {version}")
                manifests.append(_write(plan, store, options["replicas"], console))
    return manifests, [one for one in manifests if one.digest not in before]


def _write(plan: Plan, store: Store, replicas: int | None, console: Console) -> Manifest:
    """Write a planned data set; after an interrupt say what the same command will find."""
    shards, whole = plural(len(plan.shards), "shard"), 0

    def resumed(count: int) -> None:
        console.say(f"going on with what was interrupted: {count} of {shards} are there")

    def written(count: int) -> None:
        nonlocal whole
        whole = count

    try:
        with console.progress(f"writing {shards}") as progress:
            return plan.write(store, replicas, progress, resumed, written)
    except KeyboardInterrupt:
        console.say(
            f"interrupted; the same command goes on after {whole} of {shards}"
            if whole
            else "interrupted before a shard was whole; the same command begins anew"
        )
        raise


def _look(path: Path, options: dict[str, Any], spool: Spool, console: Console) -> list[Plan]:
    """Say what was found, and plan it."""
    from p2p_dmc.data.seeding import plan_data_sets

    name, found = _name(path, options), _scan(path, options, spool, console)
    cutting = {one: options[one] for one in ("max_shard_size", "order", "val_fraction")}
    plans = plan_data_sets(found, name=name, mode=options["mode"] or "file", **cutting)
    if found.tars:
        how = ", taken as they are" if plans[0].as_they_are else ", cut anew"
        found = dataclasses.replace(found, kind=found.kind + how)
    console.say(console.scan_line(path, found))
    return plans


def _look_for_new(
    path: Path, options: dict[str, Any], store: Store, spool: Spool, console: Console
) -> list[Plan | Manifest]:
    """Say what was found, and plan what of it is new."""
    from p2p_dmc.data.appending import plan_versions

    name, found = _name(path, options), _scan(path, options, spool, console)
    console.say(console.scan_line(path, found))
    cutting = {one: options[one] for one in ("max_shard_size", "order", "val_fraction")}
    cutting["mode"] = None if options["mode"] == "auto" else options["mode"]
    with console.progress("comparing it with what is there") as progress:
        return plan_versions(found, store, name=name, progress=progress, **cutting)


def _scan(path: Path, options: dict[str, Any], spool: Spool, console: Console) -> Scan:
    from p2p_dmc.data.formats import scan

    rules = {name: options[name] for name in ("stem", "include", "exclude", "depth")}
    with console.progress(f"reading {path}") as progress:
        return scan(path, **rules, spool=spool, progress=progress)


def _name(path: Path, options: dict[str, Any]) -> str:
    """Asked before anything is read. UserError for what no manifest may say."""
    name = os.path.basename(os.path.realpath(path)) if options["name"] is None else str(options["name"])
    longest = MAX_NAME_CHARACTERS - (len(HELD_OUT) if options["val_fraction"] is not None else 0)
    if not 1 <= len(name) <= longest or not name.isprintable():
        raise UserError(f"data set name {name!r:.300}: give --name with 1 to {longest} printable characters")
    return name


def _dry_run(path: Path, options: dict[str, Any], as_json: bool) -> int:
    """Say what was found and what would be made of it. Nothing is written."""
    from p2p_dmc.data.readers.base import Spool
    from p2p_dmc.data.seeding import DEFAULT_REPLICAS

    if options["append"]:
        raise UserError(
            "--dry-run with --append: what is new shows when it is compared; leave one of them out"
        )

    home = Home(options["home"])
    with Console(as_json) as console, Spool(None) as spool:
        plans = _look(path, options, spool, console)
        peers = known_peers(home, parse_seeds(options["seed"]), options)
        for plan in plans:
            say_plan(plan, options["replicas"] or DEFAULT_REPLICAS, peers, console)
        if spool.size_bytes:
            console.say(
                f"it has to be converted, which takes {format_size(spool.size_bytes)} more in {home.root} until all "
                "shards are written"
            )
        console.say("nothing was written")
    return 0


def _refuse_other_shape(store: Store, plan: Plan) -> None:
    """Without writing a shard: a data set of this home that has the name and cannot be the same."""
    from p2p_dmc.data.versions import versions

    there = versions([store.manifest(digest) for digest in store.datasets()], plan.name)
    samples, shards = plan.sample_count, len(plan.shards)
    if there and all((len(one), len(one.shards)) != (samples, shards) for one in there):
        other = there[0]
        raise UserError(
            f"{plan.name!r} is data set {other.digest.hex()} of this home, with {plural(len(other), 'sample')} in "
            f"{plural(len(other.shards), 'shard')}, not {samples} in {shards}; give this one another --name, or use "
            "--append if it has grown"
        )


def _refuse_taken_names(manifests: list[Manifest], seeds: tuple[str, ...]) -> None:
    """Ask the seeds, if one of them is there already, whether a name means something else to them."""
    if not seeds:
        return
    try:
        known = ask(seeds, "status", timeout_s=1.0)["datasets"]
    except NoAnswerError:
        return  # a seed that comes later is heard by the agent
    for manifest in manifests:
        for other in known:
            theirs = other["dataset"]
            is_same = theirs == manifest.digest.hex()
            follows = other["first"] == manifest.first.hex() and other["generation"] != manifest.generation
            if other["name"] == manifest.name and not is_same and not follows:
                is_version = other["first"] == manifest.first.hex()
                remedy = "append again, to theirs" if is_version else "seed this one under another --name"
                raise NameTakenError(
                    f"{manifest.name!r} is data set {theirs} of the peers at {', '.join(seeds)}, and "
                    f"{manifest.digest.hex()} here; {remedy}"
                )


def _print_seeding(agent: Agent, manifests: list[Manifest], console: Console, insecure: bool) -> None:
    line = f"dmc-peer join {'--insecure ' if insecure else ''}{agent.address} train.py"
    for manifest in manifests:
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
    agent: Agent, manifests: list[Manifest], leave_when_replicated: bool, is_newcomer: bool, console: Console
) -> int:
    """Until somebody ends it, every shard is elsewhere (if that is wanted), or the name turns out to be taken."""
    loop = asyncio.get_running_loop()
    contact_s = None
    while not (leave_when_replicated and agent.data.replicated_elsewhere()):
        if contact_s is None and agent.membership is not None and agent.membership.seed_contacted:
            contact_s = loop.time()
        has_just_come = is_newcomer and contact_s is not None and loop.time() - contact_s < CLASH_WINDOW_S
        is_ours = not agent.data.conflicting.isdisjoint(manifest.digest for manifest in manifests)
        if agent.data.conflict and is_ours and has_just_come:
            for manifest in manifests:  # nobody takes them under this name: leaving waits for no copies
                agent.data.forget(manifest.digest)
            raise NameTakenError(agent.data.conflict)
        await asyncio.sleep(0.2)
    console.say("every shard has its holders elsewhere; leaving")
    return 0
