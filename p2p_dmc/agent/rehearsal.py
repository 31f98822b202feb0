"""seed-dataset --dry-run: what would be made of an input, and about who would hold what."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from p2p_dmc.agent.client import NoAnswerError, ask, ask_local
from p2p_dmc.agent.home import Home
from p2p_dmc.config import format_size
from p2p_dmc.core.placement import MAX_WEIGHT, StoringPeer, placement
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural

if TYPE_CHECKING:
    from p2p_dmc.data.seeding import Plan

THIS = "this machine"
ANSWER_S = 1.0


def known_peers(home: Home, seeds: Sequence[str], options: dict[str, Any]) -> dict[StoringPeer, str]:
    """The live peers that place shards, with their names, as the home's agent, or one that answers, knows them.

    This machine is among them, unless it means to leave when all is elsewhere.
    """
    found: dict[StoringPeer, str] = {}
    running = home.running_agent()
    try:
        if running is not None:
            status = ask_local(str(running["endpoint"]), "status", timeout_s=ANSWER_S)
        else:
            status = ask((*seeds, *home.known_peers()), "status", timeout_s=ANSWER_S)
    except NoAnswerError:
        status = {"members": []}
    for member in status["members"]:
        if member["state"] in ("ALIVE", "SUSPECT") and member.get("weight"):
            peer = StoringPeer(peer_id=member["peer_id"], weight=member["weight"], domain=member["domain"])
            found[peer] = member["name"]
    if running is None and not options["leave_when_replicated"]:
        weight = min(MAX_WEIGHT, max(1, options["capacity"] >> 30))
        mine = StoringPeer(peer_id=THIS, weight=weight, domain=options["domain"])
        found[mine] = options["peer_name"] or socket.gethostname()
    return found


def say_plan(plan: Plan, replicas: int, peers: dict[StoringPeer, str], console: Console) -> None:
    """The data set that would be, and its part on each peer.

    Which shard goes where its contents decide, which are not there yet: others stand for them, so each peer's part
    is about what it will be.
    """
    sizes = plan.shard_sizes()
    stand_ins = [
        (number << 64 | shard.identity).to_bytes(16, "little") for number, shard in enumerate(plan.shards)
    ]
    placed = placement(stand_ins, list(peers), replicas)
    parts: list[dict[str, Any]] = []
    for peer, name in peers.items():
        held = placed.shards_of(peer.peer_id)
        parts.append(
            {"peer_id": peer.peer_id, "name": name, "shards": len(held), "bytes": sum(sizes[i] for i in held)}
        )
    console.fact(
        "dry_run",
        name=plan.name,
        recognised=plan.scan.kind,
        mode=plan.mode,
        samples=plan.sample_count,
        fields=list(plan.scan.extensions),
        shards=len(sizes),
        shard_bytes=sizes,
        replicas=replicas,
        converted_bytes=plan.scan.converted_bytes,
        holders=parts,
    )
    console.say(
        f"data set {plan.name!r} would be {plural(plan.sample_count, 'sample')} in "
        f"{plural(len(sizes), 'shard')} of at most {format_size(max(sizes))}, "
        f"{format_size(sum(sizes))} in all, {plural(replicas, 'replica')} wanted"
    )
    if len(peers) > 1 or THIS not in {peer.peer_id for peer in peers}:
        for part in parts:
            where = THIS if part["peer_id"] == THIS else part["peer_id"][:8]
            console.say(
                f"  {part['name']} ({where}) would hold about {plural(part['shards'], 'shard')}, "
                f"{format_size(part['bytes'])}"
            )
    if len(peers) < replicas:
        wanted = plural(replicas - len(peers), "more peer")
        console.say(
            f"{wanted} would have to join for {plural(replicas, 'replica')}; until then "
            f"{'this machine holds all of it' if len(peers) == 1 else 'each peer holds all of it'}"
            if peers
            else "no other peer is known, and this machine would wait for some to take it"
        )
