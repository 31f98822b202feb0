"""All shells at their work while nothing new goes wrong; and the end, when everything is mended."""

from __future__ import annotations

from typing import Any

from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.core.quorum import Quorum
from tests.sim.host import Host
from tests.sim.invariants import Violation
from tests.sim.world import World

SETTLE_MS = 120_000
"""Virtual time within which all must train together once all faults have ended."""
TURN_MS = 25
"""Every shell looks after everything this often."""
SAMPLES = 2
"""A round's, of each trainer in calm."""


def deliver_all(world: World) -> bool:
    """Everything that is on its way now arrives; False if there was nothing."""
    if not world.network.flying:
        return False
    links = [(link, len(queue)) for link, queue in sorted(world.network.flying.items())]
    for (source, destination), count in links:
        if not world.hosts[destination].asleep:
            for _ in range(count):
                world.deliver(source, destination)
    return any(not world.hosts[destination].asleep for (_, destination), _ in links)


def calm(world: World, ms: int) -> None:
    """So much time passes in which everybody does its work."""
    end = world.now + ms
    while world.now < end and any(host.up for host in world.hosts.values()):
        turn(world)
    world.now = world.detector.now_ms = max(world.now, end)


def turn(world: World) -> None:
    """One look of every shell after everything it has to look after."""
    world.now += TURN_MS
    world.detector.now_ms = world.now
    number = world.now // TURN_MS
    deliver_all(world)
    for host in list(world.hosts.values()):
        if host.up and host.outcome == "stopped":
            stopped(world, host, number)
        if not host.up or host.outcome:
            continue
        if number % 8 == 0:
            world.detector.truth(host, world.hosts)
        if host.up and number % 2 == 0:
            world.act(host, lambda core, now: core.tick(now))
            world.stand_aside(host)
        if host.up and host.trainer is not None:
            shell(world, host, number)


def stopped(world: World, host: Host, number: int) -> None:
    """It says so again to those that it has not heard, and ends in a while if nobody is left who may yet say it."""
    if number % 10 == 0:
        for peer in host.unheard:
            world.tell_closed(host, peer)
    if number % 80 == 0 and not any(world.network.both_ways(host.peer_id, peer) for peer in host.unheard):
        world.end(host)


def shell(world: World, host: Host, number: int) -> None:
    """What this shell does by itself: open the view, train, ask to be let in."""
    core = host.core
    assert core is not None
    if core.view is None:
        if number % 20 == 0:
            ask(world, host)
        if number % 40 == 0 and host.core is core:
            reopen(world, host)
        return
    if not host.opened and (host.learning or number % 4 == 0):
        world.adopt(host)
    if not host.training:
        return
    if host.reducing is not None:
        if not host.reducing.done and not _together(world, host):
            world.fail(host, ())
        else:
            world.finish(host)
    elif host.own() is None:
        world.enter(host, SAMPLES, 0, ())
    elif number % 4 == 0:
        repeat(world, host.peer_id)


def _together(world: World, host: Host) -> bool:
    """Whether the members that reduce with this one can still be reached."""
    assert host.reducing is not None
    others = [world.hosts[peer] for peer in host.reducing.view.peers]
    return all(
        other is host
        or (other.up and not other.failed and world.network.both_ways(host.peer_id, other.peer_id))
        for other in others
    )


def repeat(world: World, name: str) -> None:
    """Say the header again to whoever has not answered."""
    host = world.hosts.get(name)
    if host is None or not host.training or host.reducing is not None:
        return
    own, view = host.own(), host.view
    if own is None or view is None:
        return
    headers = host.barrier()
    in_vain = host.failed and headers is not None and any(h.samples for h in headers if h.finite)
    if in_vain and not host.learning:
        return  # it reduces all the same: what its header said stands
    if headers is not None and not in_vain:
        world.look_at_data(host)
        core = host.core
        if core is None or host.view is not view or host.own() != own:
            return  # it was to die with its next word, or stands in another view by now
        own = own._replace(change=core.change_wanted, closing=host.stop_asked)
    world.say_header(host, own)


def ask(world: World, host: Host | None) -> None:
    """It asks all peers with a standing view to be let in; a newcomer, of its history those that have none, too."""
    if host is None or not host.up or host.core is None or host.trainer is None or host.outcome:
        return
    if host.core.view is not None:
        return
    for other in list(world.hosts.values()):
        reachable = other is not host and other.up and world.network.both_ways(host.peer_id, other.peer_id)
        if reachable and other.outcome == "finished":
            world.finished(host, other.held)
            return
        core = host.core
        if core is None or not reachable or other.core is None or other.outcome:
            continue
        if other.opened or (core._courted and other.core.history == core._courted):
            world.act(other, lambda core, now: core.join_requested(host.peer_id, now))


def reopen(world: World, host: Host | None) -> None:
    """Nobody has a view, as far as it knows: found the run again with whoever can be reached.

    So does who has begun to found it and has been in no view yet, with those of the others with whom it has begun.
    """
    if host is None or not host.up or host.core is None or host.trainer is None or host.outcome:
        return
    core = host.core
    founders = {peer for view in core._pending for peer in view.peers if peer != host.peer_id}
    if core.view is not None or not (core.history or founders):
        return
    reached = [
        other
        for other in world.hosts.values()
        if other is not host and other.up and world.network.both_ways(host.peer_id, other.peer_id)
    ]
    if any(other.opened and not other.outcome for other in reached):
        return  # it asks them
    able = [other.peer_id for other in reached if other.trainer is not None]
    peers = sorted([host.peer_id, *(peer for peer in able if core.history or peer in founders)])
    world.act(host, lambda core, now: core.found(tuple(peers), now))


def yield_history(world: World, host: Host | None) -> None:
    """One that was evicted, or (with `Quorum.ANY`) has fewer samples committed, or is only courted, gives way."""
    if host is None or not host.up or host.core is None or host.outcome:
        return
    mine = _samples(host), host.core.history or host.core._courted
    for other in list(world.hosts.values()) if mine[1] else ():
        core = other.core
        strange = core is not None and other.up and core.history not in (b"", mine[1])
        if not strange or core is None or not world.network.both_ways(host.peer_id, other.peer_id):
            continue
        taken = any(
            one.history == mine[1] and one.evicted for one in core._replaced
        )  # an operator evicted us
        ahead = (_samples(other), core.history) > mine
        if taken or (ahead and (mine[0] == 0 or world.quorum is Quorum.ANY)):
            give_up(world, host)
            return


def give_up(world: World, host: Host) -> None:
    """From here on it is a newcomer."""
    held = host.held
    newcomer = held.renamed(StateRef(lineage=(0, 0), digest=held.ref.digest))
    host.leave_view()
    host.view, host.stood_in, host.carried = None, 0, ()
    if host.trainer is not None:
        host.trainer.base = None
        host.trainer.local.clear()
        host.trainer.queue.clear()
    host.held, host.models, host.committed, host.checkpoint = (
        newcomer,
        {held.ref.digest: newcomer},
        None,
        None,
    )
    world.act(host, lambda core, now: core.yield_history(newcomer.ref, now))


def _samples(host: Host) -> int:
    return host.held.ledger.samples_total if host.held.ref.lineage > (0, 0) else 0


def settle(world: World) -> None:
    """Everything is mended. Raise unless all soon train in one view, or the run is over for all."""
    mend(world)
    end, target = world.now + SETTLE_MS, None
    living = [host for host in world.hosts.values() if host.boot]
    while world.now < end:
        turn(world)
        if not world.checker.one_history and world.now // TURN_MS % 40 == 0:
            for host in living:
                yield_history(world, host)
        if world.over():
            return
        for host in living:
            if host.outcome == "stopped" and world.now // TURN_MS % 400 == 0:
                world.end(host)  # for whom it waits goes on
            if host.core is None:  # stopped by agreement just now
                _start_again(world, host)
        rounds = [_settled_rounds(host, living) for host in living]
        if None in rounds:
            target = None
            continue
        numbers: list[Any] = rounds
        target = target or max(numbers) + 3
        if min(numbers) >= target:
            return
    waits = {host.peer_id: host.core.waiting_for() for host in living if host.core is not None}
    raise Violation(0, f"nothing happens any more at {world.now}: {waits}")


def mend(world: World) -> None:
    """All cables are whole, everybody is awake and has a trainer and all shards."""
    world.network.heal()
    world.network.flying.clear()
    for host in list(world.hosts.values()):
        host.asleep, host.armed, host.stop_asked = False, None, False
        host.holdings = set(range(host.shards))
        world.end(host)
        if host.core is None and host.boot:
            _start_again(world, host)
        if host.up:
            world.rejoin(host)


def _start_again(world: World, host: Host) -> None:
    world.restart(host)
    host.stop_asked = False


def _settled_rounds(host: Host, living: list[Host]) -> int | None:
    view = host.core.view if host.core is not None else None
    if view is None or {voter.peer_id for voter in view.voters} != {other.peer_id for other in living}:
        return None
    return host.held.ref.lineage[1]
