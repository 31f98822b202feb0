"""What can happen, as verbs: the language of schedules, of scenarios and of traces alike."""

from __future__ import annotations

from collections.abc import Callable

from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import Ready, Verdict
from tests.sim import calm
from tests.sim.host import Host
from tests.sim.world import Decision, World

VERBS: dict[str, Callable[..., None]] = {}
"""What each decision does to a world; the docstring says how it is written."""


def verb(function: Callable[..., None]) -> Callable[..., None]:
    VERBS[function.__name__.rstrip("_")] = function
    return function


def apply(world: World, decision: Decision) -> None:
    """One decision. It has no effect where it makes no sense."""
    VERBS[decision[0]](world, *decision[1:])


def _host(world: World, name: str) -> Host | None:
    """A host whose agent does something."""
    host = world.hosts.get(name)
    return host if host is not None and host.up else None


# -- time and messages -----------------------------------------------------------------------------


@verb
def wait(world: World, ms: int) -> None:
    """wait MS: time passes, and nothing happens in it."""
    world.now += ms
    world.detector.now_ms = world.now


@verb
def tick(world: World, name: str) -> None:
    """tick A: its timers are looked at."""
    if (host := _host(world, name)) is not None and not host.outcome:
        world.act(host, lambda core, now: core.tick(now))


@verb
def deliver(world: World, source: str, destination: str, index: int = 0) -> None:
    """deliver A B [K]: the K-th message on its way from A to B arrives, or is lost at a cut."""
    world.deliver(source, destination, index)


@verb
def twice(world: World, source: str, destination: str, index: int = 0) -> None:
    """twice A B [K]: it arrives, and will do so again."""
    world.deliver(source, destination, index, keep=True)


@verb
def drop(world: World, source: str, destination: str, index: int = 0) -> None:
    """drop A B [K]: it is lost."""
    world.network.take(source, destination, index)


@verb
def flush(world: World, times: int = 100) -> None:
    """flush [N]: everything on its way arrives, in order on each link, N times or until nobody says anything more."""
    for _ in range(times):
        if not calm.deliver_all(world):
            return


@verb
def calm_(world: World, ms: int) -> None:
    """calm MS: cuts and deaths stay as they are, nothing new goes wrong, and all do their work."""
    calm.calm(world, ms)


@verb
def settle(world: World) -> None:
    """settle: everything is mended, and all must soon train together. Rival histories are for people to choose from."""
    if world.checker.one_founding and not world.checker.one_history:
        calm.mend(world)
        calm.calm(world, 10_000)
        choose(world)
    calm.settle(world)


@verb
def found(world: World, *names: str) -> None:
    """found A B C: they find each other, and each begins to found the run with the others."""
    for name in names:
        world.arrive(name)
    for name in names:
        world.detector.meet(world.hosts[name], [world.hosts[other] for other in names])
    for name in names:
        if (host := _host(world, name)) is not None and not host.outcome:
            world.act(host, lambda core, now: core.found(tuple(sorted(names)), now))


# -- cables ----------------------------------------------------------------------------------------


@verb
def cut(world: World, name: str, side: int = 1) -> None:
    """cut A [SIDE]: its cable goes to that side; peers on different sides do not hear each other."""
    world.faults += 1
    world.network.side[name] = side


@verb
def deaf(world: World, destination: str, source: str) -> None:
    """deaf A B: A hears nothing of B from now on, or, said again, does."""
    world.faults += 1
    world.network.deaf ^= {(source, destination)}
    world.checker.calm_founding &= bool(world.checker.began)


@verb
def heal(world: World) -> None:
    """heal: all cables are whole."""
    world.network.heal()


# -- machines --------------------------------------------------------------------------------------


@verb
def crash(world: World, name: str) -> None:
    """crash A: its agent and trainer die."""
    if (host := world.hosts.get(name)) is not None and host.core is not None:
        world.crash(host)


@verb
def arm(world: World, name: str, words: int) -> None:
    """arm A K: it dies at its next promise, which is on disk, with K words of it said."""
    if (host := world.hosts.get(name)) is not None and host.core is not None:
        host.armed = words


@verb
def restart(world: World, name: str, memory: str = "") -> None:
    """restart A [memory | dark]: its agent starts again; its shared memory is still there, or power failed."""
    if (host := world.hosts.get(name)) is not None:
        world.restart(host, memory=memory == "memory")


@verb
def wipe(world: World, name: str) -> None:
    """wipe A: a dead machine loses its disk. Who comes back on it is somebody else."""
    host = world.hosts.get(name)
    if host is not None and host.core is None and host.boot:
        world.faults += 1
        host.boot, host.closed, host.checkpoint, host.memory = 0, False, None, None
        world.network.forget(name)
        world.arrive(f"{name}x")


@verb
def freeze(world: World, name: str) -> None:
    """freeze A: SIGSTOP."""
    if (host := world.hosts.get(name)) is not None and host.core is not None and not host.asleep:
        world.faults += 1
        host.asleep = True


@verb
def thaw(world: World, name: str) -> None:
    """thaw A: SIGCONT."""
    if (host := world.hosts.get(name)) is not None:
        host.asleep = False


@verb
def jump(world: World, name: str, ms: int) -> None:
    """jump A MS: its wall clock jumps."""
    if (host := world.hosts.get(name)) is not None:
        host.wall_ms += ms


@verb
def leave(world: World, name: str) -> None:
    """leave A: it writes what is committed, says goodbye and ends."""
    host = _host(world, name)
    if host is None or host.outcome:
        return
    if host.committed is not None and host.committed.ref.lineage > (0, 0):
        checkpoint(world, name)
    if host.core is None:
        return
    withdraw(world, name)
    if host.core is not None:
        host.last_version = host.boot, host.core.promise_version
        host.reset()


@verb
def withdraw(world: World, name: str, in_hand: str = "") -> None:
    """withdraw A [in-hand]: its trainer dies, perhaps of the samples it has in hand, and its agent says so."""
    host = _host(world, name)
    if host is None or host.trainer is None or host.core is None or host.outcome:
        return
    world.faults += 1
    world.withdraw(host, host.core, in_hand=bool(in_hand))


@verb
def aside(world: World, name: str) -> None:
    """aside A: it stands aside, if it alone has heard nothing of somebody for long."""
    if (host := _host(world, name)) is not None:
        world.stand_aside(host)


@verb
def rejoin(world: World, name: str) -> None:
    """rejoin A: its agent has started another trainer."""
    if (host := _host(world, name)) is not None:
        world.rejoin(host)


@verb
def join(world: World, name: str) -> None:
    """join D: a new machine."""
    world.arrive(name)


# -- rounds ----------------------------------------------------------------------------------------


@verb
def enter(world: World, name: str, samples: int = 2, prefetch: int = 0, *lost: str) -> None:
    """enter A [N [PREFETCH [X Y ...]]]: N local steps are done and its header is said, which X and Y miss."""
    if (host := world.hosts.get(name)) is not None:
        world.enter(host, samples, prefetch, lost)


@verb
def bad(world: World, name: str, samples: int = 1) -> None:
    """bad A [N]: its delta is not finite."""
    if (host := world.hosts.get(name)) is not None:
        world.enter(host, samples, 0, (), finite=False)


@verb
def repeat(world: World, name: str) -> None:
    """repeat A: it says its header again, with the flags as they are now if nothing else leads on."""
    calm.repeat(world, name)


@verb
def finish(world: World, name: str) -> None:
    """finish A: the collective ends well there."""
    if (host := world.hosts.get(name)) is not None:
        world.finish(host)


@verb
def fail(world: World, name: str, *lost: str) -> None:
    """fail A [X Y ...]: the collective fails there; X and Y are not told."""
    if (host := world.hosts.get(name)) is not None:
        world.fail(host, lost)


@verb
def checkpoint(world: World, name: str) -> None:
    """checkpoint A: what it knows to be committed is on its disk now."""
    host = _host(world, name)
    if host is None or host.committed is None or host.outcome:
        return
    if host.checkpoint is not None and host.checkpoint.ref.lineage >= host.committed.ref.lineage:
        return
    committed = host.checkpoint = host.committed
    world.act(host, lambda core, now: core.checkpointed(committed.ref.lineage, now))


@verb
def adopt(world: World, name: str) -> None:
    """adopt A: its download of the state that its view starts from ends; a learner's gets on by a step."""
    if (host := world.hosts.get(name)) is not None:
        world.adopt(host)


@verb
def stop(world: World, name: str) -> None:
    """stop A: `dmc-peer stop` there. All that can be reached are told."""
    host = _host(world, name)
    if host is None or host.view is None:
        return
    for other in world.hosts.values():
        if other is host or (other.up and world.network.linked(name, other.peer_id)):
            other.stop_asked = True


@verb
def tell(world: World, name: str) -> None:
    """tell A: it has stopped with the run, and says so again to those that it has not heard."""
    if (host := _host(world, name)) is not None:
        for peer in host.unheard:
            world.tell_closed(host, peer)


@verb
def end(world: World, name: str) -> None:
    """end A: its process, which has stopped with the run, ends."""
    if (host := world.hosts.get(name)) is not None:
        world.end(host)


# -- data ------------------------------------------------------------------------------------------


@verb
def hold(world: World, name: str, shard: int) -> None:
    """hold A S: it has fetched a shard."""
    if (host := world.hosts.get(name)) is not None:
        host.holdings.add(shard % host.shards)


@verb
def lose(world: World, name: str, shard: int) -> None:
    """lose A S: a shard is gone from its disk."""
    if (host := world.hosts.get(name)) is not None:
        host.holdings.discard(shard % host.shards)


@verb
def full(world: World, name: str) -> None:
    """full A: its disk is full, or, said again, is not."""
    if (host := world.hosts.get(name)) is not None:
        host.full = not host.full


@verb
def speed(world: World, name: str, samples: int) -> None:
    """speed A N: it trains so many samples a second."""
    if (host := world.hosts.get(name)) is not None:
        host.speed = samples


# -- membership ------------------------------------------------------------------------------------


@verb
def probe(world: World, name: str, other: str) -> None:
    """probe A B: A acknowledges a probe of B."""
    if name in world.hosts and other in world.hosts:
        world.detector.probe(world.hosts[name], world.hosts[other])


@verb
def suspect(world: World, name: str, other: str) -> None:
    """suspect A B: A's suspicion of B runs out."""
    if name in world.hosts and other in world.hosts:
        world.detector.suspect(world.hosts[name], world.hosts[other])


@verb
def refused(world: World, name: str, other: str) -> None:
    """refused A B: B's machine refuses A, for B is dead."""
    if name in world.hosts and other in world.hosts:
        world.detector.see_crash(world.hosts[name], world.hosts[other])


@verb
def truth(world: World, name: str) -> None:
    """truth A: its detector has caught up."""
    if name in world.hosts:
        world.detector.truth(world.hosts[name], world.hosts)


# -- the shell's requests --------------------------------------------------------------------------


@verb
def ask(world: World, name: str) -> None:
    """ask A: it asks all peers with a standing view to be let in."""
    calm.ask(world, world.hosts.get(name))


@verb
def reopen(world: World, name: str) -> None:
    """reopen A: it founds the run again with whoever it reaches: nobody has a view, as far as it knows."""
    calm.reopen(world, world.hosts.get(name))


@verb
def yield_(world: World, name: str) -> None:
    """yield A: it looks for rivals, and gives up its history if another has committed more."""
    calm.yield_history(world, world.hosts.get(name))


@verb
def court(world: World, name: str) -> None:
    """court A: it was asked to join a history of which it hears nobody, and joins one that goes on (`entering.py`)."""
    host = _host(world, name)
    if host is None or host.outcome or host.core is None or host.core.history or not host.core._courted:
        return
    heard = [
        h for h in world.hosts.values() if h is not host and h.up and world.network.both_ways(name, h.peer_id)
    ]
    if any(h.core is not None and h.core.history == host.core._courted for h in heard):
        return
    replaced = {old.history for h in heard if h.core is not None for old in h.core._replaced if old.evicted}
    standing = {h.core.history for h in heard if h.core is not None and h.core.view is not None}
    if found := standing - replaced or standing:
        world.act(host, lambda core, now: core.court_another(max(found), now))


@verb
def want(world: World, name: str, at_once: str = "") -> None:
    """want A [at-once]: it wants another view, at the next barrier or at once."""
    if (host := _host(world, name)) is not None and not host.outcome:
        world.act(host, lambda core, now: core.wants_change("it wants to", now, at_once=bool(at_once)))


@verb
def evict(world: World, name: str, other: str) -> None:
    """evict A B: at A an operator says that B is gone for good. Refused for one that A hears (`agent/evicting.py`)."""
    host = _host(world, name)
    if host is None or host.outcome or host.trainer is None:
        return
    _, verdict = host.verdicts.get(other, (0, Verdict.UNREACHABLE))
    if (
        verdict is not Verdict.REACHABLE
        and world.act(host, lambda core, now: core.evict(other, now)).accepted
    ):
        world.checker.one_history = False


@verb
def choose(world: World) -> None:
    """choose: of histories of which none took another's place, people stop all but the one with most samples."""
    living = [
        (h, h.core) for h in world.hosts.values() if h.core is not None and h.core.history and not h.outcome
    ]
    taken = {old.history for _, core in living for old in core._replaced if old.evicted}
    left = [
        (h.held.ledger.samples_total, core.history, core) for h, core in living if core.history not in taken
    ]
    if not left:
        return
    _, chosen, core = max(left, key=lambda facts: facts[:2])
    yields = {chosen, *(old.history for old in core._replaced if old.evicted)}
    for host, other in living:
        if other.history not in yields:
            calm.give_up(world, host)


@verb
def force(world: World, name: str) -> None:
    """force A: an attempt without any cause. That nobody starts one is not what safety rests on."""
    host = _host(world, name)
    if host is None or host.outcome or host.trainer is None:
        return
    others = [o.peer_id for o in world.hosts.values() if o.up and world.network.both_ways(name, o.peer_id)]

    def event(core: Agreement, now: int) -> Ready:
        core._begin(now)
        if core.history and (core.view is None or core.me in core.view.voters):
            me = (name,) if core.view is None else ()
            core._open(core._n + 1, others, (), me, "for no reason")
        return core._finish()

    world.act(host, event)


def written(decision: Decision) -> str:
    """The decision as a line of a scenario."""
    return " ".join(map(str, decision))


def parsed(line: str) -> Decision:
    """The inverse of `written`; ValueError for an unknown verb."""
    verb_, *arguments = line.split()
    if verb_ not in VERBS:
        raise ValueError(f"no such verb: {verb_!r}; there are {', '.join(sorted(VERBS))}")
    return (verb_, *[int(a) if a.lstrip("-").isdigit() else a for a in arguments])
