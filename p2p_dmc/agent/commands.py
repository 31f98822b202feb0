"""seed-dataset and join: the commands that are an agent while they run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import NoAnswerError, Submission, ask, ask_local
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.jobs import RunFinishedError
from p2p_dmc.agent.run_files import load_names
from p2p_dmc.core.membership import Role
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural
from p2p_dmc.wire.messages import SubmitEnded, SubmitScript
from p2p_dmc.wire.transport import normalise_address, reachable_host, split_address

if TYPE_CHECKING:
    from p2p_dmc.data.manifest import Manifest
    from p2p_dmc.data.store import Store

Work = Callable[[Agent], Awaitable[int]]

CLASH_WINDOW_S = 5.0
"""After the first contact, a name that others use for another data set ends the newcomer's command, not theirs."""
EXIT_INTERRUPTED = 130


# -- seed-dataset -------------------------------------------------------------------------------------------------


def seed_dataset(*, path: Path, debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer seed-dataset`: exit code."""
    home = Home(options["home"])
    with Console(as_json) as console, _locked(home):
        network = _network(options["listen"], options["advertise"], options["insecure"], console)
        _log_to(home, debug)
        seeds = _seeds(options["seed"])
        manifest, is_new = _shard(home, path, options, console)
        is_newcomer = bool(seeds or home.known_peers())
        agent_options = AgentOptions(
            home=home.root,
            name=options["peer_name"] or socket.gethostname(),
            seeds=seeds,
            role=Role.STORE,
            capacity_bytes=options["capacity"],
            stays=not options["leave_when_replicated"],
            **network,
        )

        async def work(agent: Agent) -> int:
            agent.data.add(manifest)
            _print_seeding(agent, manifest, console, options["insecure"])
            agent.spawn(_say_contact(agent, seeds, console))
            return await _serve(agent, manifest, options["leave_when_replicated"], is_newcomer, console)

        try:
            _refuse_taken_name(manifest, seeds)
            return _run_agent(agent_options, home, console, work)
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
    if _is_loopback(split_address(agent.address)[0]):
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


# -- join ---------------------------------------------------------------------------------------------------------


def join(*, words: tuple[str, ...], debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer join`: exit code."""
    seed, script, arguments = split_words(words)
    home = Home(options["home"])
    seeds = _seeds(seed)
    job = _submission(script or "", arguments, seeds, options) if script or options["attach"] else None
    with Console(as_json) as console:
        running = home.running_agent()
        if running is not None and job is not None:
            return _hand_over(running, job, console)
        if not seeds and not home.known_peers() and job is None:
            raise UserError("nothing to join: give the address of a peer, as `seed-dataset` prints it")
        with _locked(home):
            network = _network(options["listen"], options["advertise"], options["insecure"], console)
            _check_reach(seeds, network)
            _log_to(home, debug)
            agent_options = AgentOptions(
                home=home.root,
                name=options["name"] or socket.gethostname(),
                seeds=seeds,
                role=Role.TRAIN if job else Role.STORE,
                capacity_bytes=options["capacity"],
                **network,
            )
            return _run_agent(agent_options, home, console, lambda agent: _train(agent, job, seeds, console))


async def _train(agent: Agent, job: SubmitScript | None, seeds: tuple[str, ...], console: Console) -> int:
    console.fact("listening", peer_id=agent.peer_id, name=agent.options.name, address=agent.address)
    console.say(f"peer {agent.peer_id[:8]} ({agent.options.name}) listens at {agent.address}")
    console.narrator.names[agent.peer_id] = agent.options.name
    agent.spawn(_say_contact(agent, seeds, console))
    if job is None:
        console.say("holding and serving shards; Ctrl-C leaves")
        await agent.leaving.wait()
        return 0
    _say_start(job, console)
    # what was heard so far was told to no job, and some that the run knows may not be back yet
    names = load_names(agent.home.run_folder(job.run))
    console.narrator.names.update(names | {r.peer_id: r.name for r in agent.members()})
    try:
        running = agent.jobs.submit(job, console.local)
    except RunFinishedError as finished:
        console.say(str(finished))
        return 0
    await running.ended.wait()
    return _said_end(job, running.result, console)


def _say_start(job: SubmitScript, console: Console) -> None:
    if job.min_peers == 1:
        console.say(f"run {job.run!r} starts with 1 trainer or more (--min-peers N waits for N)")
    else:
        console.say(f"run {job.run!r} starts once {job.min_peers} trainers are ready")


def _said_end(job: SubmitScript, result: SubmitEnded | None, console: Console) -> int:
    if result is None:
        raise AssertionError("a job ended without a result")
    console.fact("ended", run=job.run, code=result.code, line=result.line)
    if result.code:
        raise UserError(result.line)
    is_path = result.line.startswith("/")
    console.say(f"run {job.run!r} is finished: {result.line}" if is_path else result.line or "done")
    return 0


async def _say_contact(agent: Agent, seeds: tuple[str, ...], console: Console) -> None:
    """A peer that was started before its seed waits for it, and says so."""
    seeds = seeds or tuple(agent.home.known_peers())
    if not seeds:
        return
    loop = asyncio.get_running_loop()
    started_s, said = loop.time(), False
    while agent.membership is not None and not agent.membership.seed_contacted:
        if not said and loop.time() - started_s > 2.0:
            said = True
            console.say(
                f"no peer answers at {', '.join(seeds)} yet; trying again until one does (Ctrl-C gives up)"
            )
        await asyncio.sleep(0.1)
    others = sum(r.peer_id != agent.peer_id for r in agent.members())
    console.say(f"in contact with {plural(others, 'other peer')}")


def _hand_over(running: dict[str, Any], job: SubmitScript, console: Console) -> int:
    """The home's agent already runs: it gets the script, this command shows what comes of it.

    Ctrl-C, or an output that nobody reads any more, makes the peer leave the run; its agent goes on.
    """
    console.say(f"the agent of this home, at {running['address']}, gets the script")
    with contextlib.suppress(UserError):
        members = ask_local(str(running["endpoint"]), "status")["members"]
        console.narrator.names.update({m["peer_id"]: m["name"] for m in members})
    _say_start(job, console)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job begins with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    submission = Submission(str(running["endpoint"]), job)
    console.output.on_broken = lambda: os.kill(os.getpid(), signal.SIGINT)
    try:
        try:
            return _follow(submission, job, console)
        except KeyboardInterrupt:
            console.say("leaving the run (again: at once)")
            submission.leave()
        return _follow(submission, job, console) or int(console.output.broken)
    finally:
        submission.close()


def _follow(submission: Submission, job: SubmitScript, console: Console) -> int:
    while not isinstance(message := submission.receive(), SubmitEnded):
        console.local(message)
    return _said_end(job, message, console)


def split_words(words: tuple[str, ...]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """[SEED] [SCRIPT [ARGS...]]: a seed has the form of an address, a script is a file."""
    seed: str | None = None
    if words and _is_address(words[0]):
        seed, words = words[0], words[1:]
    if not words:
        return seed, None, ()
    script = words[0]
    if script.startswith("-"):
        raise click.UsageError(
            f"{script!r} is no option of join; join's options come before SEED, the script's after SCRIPT"
        )
    if not Path(script).is_file():
        kind = (
            "file" if seed is not None or script.endswith(".py") else "file and no address (tcp://HOST:PORT)"
        )
        raise UserError(f"{script!r} is no {kind}; give the path of a Python script")
    return seed, script, words[1:]


def _is_address(word: str) -> bool:
    return all(re.fullmatch(r"(tcp://)?[^/\s]+:\d+", part) for part in word.split(","))


def _submission(
    script: str, arguments: tuple[str, ...], seeds: tuple[str, ...], options: dict[str, Any]
) -> SubmitScript:
    run = options["run"] or Path(script).stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", run):
        origin = "--run" if options["run"] else "the script's name"
        raise UserError(
            f"{run!r} ({origin}) is no name of a run: letters, digits, '.', '_' and '-', 64 at most; give --run NAME"
        )
    return SubmitScript(
        run=run,
        script=str(Path(script).resolve()),
        arguments=arguments,
        quorum=options["quorum"] or "",
        backend=options["backend"] or "",
        min_peers=options["min_peers"],
        checkpoint_every_s=options["checkpoint_every"],
        on_lost=options["on_lost"] or "",
        seeds=seeds,
        attach=options["attach"] or 0,
        folder=str(Path.cwd()),
        environment=tuple(sorted(os.environ.items())),
    )


def _seeds(text: str | None) -> tuple[str, ...]:
    """One address or several, comma-separated."""
    return tuple(normalise_address(part.strip()) for part in (text or "").split(",") if part.strip())


def _network(listen: str | None, advertise: str | None, insecure: bool, console: Console) -> dict[str, Any]:
    """Where to listen and what to tell others, for AgentOptions; UserError beyond loopback without --insecure."""
    host, port = split_address(listen) if listen else (None, None)
    try:
        is_local = host is None or socket.gethostbyname(host).startswith("127.") or host == "::1"
    except OSError:
        raise UserError(f"--listen {listen}: {host!r} is no address of this machine") from None
    if not is_local and not insecure:
        raise UserError(
            f"--listen {listen} can be reached from other machines, and there are no keys yet: "
            "add --insecure on a network that you trust"
        )
    if insecure and host is None:
        host, shown = "0.0.0.0", reachable_host() if advertise is None else "0.0.0.0"
    elif host in ("0.0.0.0", "::"):
        shown = reachable_host() if advertise is None else host
    else:
        shown = host or "127.0.0.1"
    if insecure:
        console.say("--insecure: whoever reaches this port can join; use it on a network that you trust")
    return {
        "bind_host": host or "127.0.0.1",
        "port": port,
        "advertise_host": shown,
        "advertise": normalise_address(advertise) if advertise else None,
    }


def _check_reach(seeds: tuple[str, ...], network: dict[str, Any]) -> None:
    """UserError for a peer that listens on loopback only and is to join one elsewhere: that one could not answer."""
    elsewhere = [seed for seed in seeds if not _is_loopback(split_address(seed)[0])]
    if elsewhere and _is_loopback(network["bind_host"]) and not network["advertise"]:
        raise UserError(
            f"{elsewhere[0]} is on another machine, and this peer would listen on loopback only, where nobody there "
            "can reach it: add --insecure on a network that you trust"
        )


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def _locked(home: Home) -> Iterator[None]:
    """This process is the home's only agent; UserError names the one that is."""
    running = home.running_agent()
    if running is not None:
        raise UserError(
            f"an agent of {home.root} runs at {running['address']}; give it a script with `join SCRIPT`, end it "
            f"with `dmc-peer leave --home {home.root}`, or use another --home"
        )
    try:
        home.lock()
        try:
            yield
        finally:
            home.unlock()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise UserError(
            f"{error.filename or home.root}: {error.strerror}; make room or mend it, or use another --home"
        ) from error


def _log_to(home: Home, debug: bool) -> None:
    """agent.log. A full disk costs lines of it, never words on the terminal."""
    logging.raiseExceptions = False
    handler = logging.FileHandler(home.root / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("p2p_dmc", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("p2p_dmc").setLevel(logging.DEBUG if debug else logging.INFO)


# -- an agent's life ----------------------------------------------------------------------------------------------


def _run_agent(options: AgentOptions, home: Home, console: Console, work: Work) -> int:
    """The agent's loop until the work is done, Ctrl-C, or somebody makes it leave."""
    return asyncio.run(_agent_life(options, home, console, work))


async def _agent_life(options: AgentOptions, home: Home, console: Console, work: Work) -> int:
    def say(line: str) -> None:
        console.say(line)
        agent.jobs.relay(line)

    agent = Agent(options, home, say)
    _leave_on_signals(agent, home, console)
    try:
        await agent.start()
    except (UserError, OSError):
        await agent.stop(graceful=False)
        raise
    working = asyncio.ensure_future(work(agent))
    leaving = asyncio.create_task(agent.leaving.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        await agent.stop()
        if agent.fault:
            raise UserError(agent.fault)
        return (working.result() if working.done() else 0) or int(console.output.broken)
    finally:
        working.cancel()
        leaving.cancel()


def _leave_on_signals(agent: Agent, home: Home, console: Console) -> None:
    """The first signal leaves gracefully, a second one at once; an output that nobody reads counts as one."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if not agent.leaving.is_set():
            console.say("leaving (again: at once)")
            agent.leaving.set()
            return
        console.say("leaving at once")
        agent.jobs.kill_all()
        agent.memory.remove()
        home.unlock()
        console.output.close(0.2)
        os._exit(EXIT_INTERRUPTED)  # a thread that writes or hashes would be waited for

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)  # a closed terminal, unless nohup was asked for
    for number in numbers:
        loop.add_signal_handler(number, interrupted)

    def broken() -> None:
        loop.call_soon_threadsafe(agent.leaving.set)

    console.output.on_broken = broken
