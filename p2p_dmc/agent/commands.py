"""seed-dataset and join: the commands that are an agent while they run."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import submit as submit_to
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.jobs import RunFinishedError
from p2p_dmc.config import parse_size
from p2p_dmc.core.membership import Role
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.wire.messages import SubmitEnded, SubmitScript
from p2p_dmc.wire.transport import normalise_address, reachable_host, split_address

Work = Callable[[Agent], Awaitable[int]]


def seed_dataset(*, path: Path, debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer seed-dataset`: exit code."""
    console = Console(as_json)
    capacity = _size(options["capacity"], "--capacity")
    shard_size = options["max_shard_size"]
    limit = shard_size if shard_size == "auto" else _size(shard_size, "--max-shard-size")
    home = Home(options["home"])
    network = _network(options["listen"], options["advertise"], options["insecure"], console)
    seeds = _seeds(options["seed"])
    home.lock()
    try:
        _log_to(home, debug)
        manifest = _shard(home, path, options, limit, capacity, console)
        agent_options = AgentOptions(
            home=home.root,
            name=options["peer_name"] or socket.gethostname(),
            seeds=seeds,
            role=Role.STORE,
            capacity_bytes=capacity,
            **network,
        )

        async def work(agent: Agent) -> int:
            agent.data.add(manifest)
            _print_seeding(agent, manifest, console, options["insecure"])
            if not options["leave_when_replicated"]:
                return await _until_conflict(agent)
            while not agent.data.replicated_elsewhere():
                if agent.data.conflict:
                    raise UserError(agent.data.conflict)
                await asyncio.sleep(0.2)
            console.say("every shard has its holders elsewhere; leaving")
            return 0

        return _run_agent(agent_options, home, console, work)
    finally:
        home.unlock()


async def _until_conflict(agent: Agent) -> int:
    while not agent.data.conflict:
        await asyncio.sleep(0.2)
    raise UserError(agent.data.conflict)


def _shard(home: Home, path: Path, options: dict[str, Any], limit: Any, capacity: int, console: Console) -> Any:
    """Scan, plan, write; the manifest, which the store has published."""
    from p2p_dmc.data.formats import scan
    from p2p_dmc.data.sharding import plan_shards, write_shards
    from p2p_dmc.data.store import Store

    name = options["name"] or path.resolve().name
    found = scan(path, stem=options["stem"], include=options["include"], depth=options["depth"])
    console.say(console.scan_line(path, found))
    plan = plan_shards(found, mode=options["mode"], max_shard_size=limit, order=options["order"], seed=0)
    store = Store(home.store_root, capacity)
    with console.progress(f"writing {len(plan)} shards") as progress:
        manifest = write_shards(
            plan,
            store,
            name=name,
            mode=options["mode"],
            replicas=options["replicas"],
            seed=0,
            progress=progress,
        )
    return manifest


def _print_seeding(agent: Agent, manifest: Any, console: Console, insecure: bool) -> None:
    line = f"dmc-peer join {'--insecure ' if insecure else ''}{agent.address} train.py"
    console.fact(
        "seeding",
        name=manifest.name,
        dataset=manifest.digest.hex(),
        samples=len(manifest),
        shards=len(manifest.shards),
        address=agent.address,
        join=line,
    )
    console.say(
        f"data set {manifest.name!r}: {len(manifest)} samples with fields {', '.join(manifest.fields)} "
        f"in {len(manifest.shards)} shards, {manifest.replicas} replicas wanted"
    )
    console.say(f"serving at {agent.address}; on each machine that trains, run:\n\n    {line}\n")


def join(*, words: tuple[str, ...], debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer join`: exit code."""
    console = Console(as_json)
    seed, script, arguments = split_words(words)
    home = Home(options["home"])
    seeds = _seeds(seed)
    job = _submission(script, arguments, seeds, options) if script else None
    running = home.running_agent()
    if running is not None and job is not None:
        return _hand_over(str(running["endpoint"]), job, console)
    if not seeds and not home.known_peers() and job is None:
        raise UserError("nothing to join: give the address of a peer, as `seed-dataset` prints it")
    network = _network(options["listen"], options["advertise"], options["insecure"], console)
    capacity = _size(options["capacity"], "--capacity")
    home.lock()
    try:
        _log_to(home, debug)
        agent_options = AgentOptions(
            home=home.root,
            name=options["name"] or socket.gethostname(),
            seeds=seeds,
            role=Role.TRAIN if job else Role.STORE,
            capacity_bytes=capacity,
            **network,
        )
        return _run_agent(agent_options, home, console, lambda agent: _train(agent, job, seeds, console))
    finally:
        home.unlock()


async def _train(agent: Agent, job: SubmitScript | None, seeds: tuple[str, ...], console: Console) -> int:
    console.say(f"peer {agent.peer_id[:8]} ({agent.options.name}) listens at {agent.address}")
    if seeds:
        agent.spawn(_say_contact(agent, seeds, console))
    if job is None:
        console.say("holding and serving shards; Ctrl-C leaves")
        await asyncio.Event().wait()
    if job is None:
        raise AssertionError("unreachable: the event above is never set")
    if job.min_peers == 1:
        console.say(f"run {job.run!r} starts with 1 trainer or more (--min-peers N waits for N)")
    try:
        running = agent.jobs.submit(job, lambda message: console.local(message))
    except RunFinishedError as finished:
        console.say(str(finished))
        return 0
    await running.ended.wait()
    return _said_end(running.result, console)


def _said_end(result: SubmitEnded | None, console: Console) -> int:
    if result is None:
        raise AssertionError("a job ended without a result")
    console.fact("ended", code=result.code, line=result.line)
    if result.code:
        raise UserError(result.line)
    console.say(result.line if result.line else "done")
    return 0


async def _say_contact(agent: Agent, seeds: tuple[str, ...], console: Console) -> None:
    """A peer that was started before its seed waits for it, and says so."""
    loop = asyncio.get_running_loop()
    started_s, said = loop.time(), False
    while agent.membership is not None and not agent.membership.seed_contacted:
        if not said and loop.time() - started_s > 2.0:
            said = True
            console.say(f"no peer answers at {', '.join(seeds)} yet; trying again until one does (Ctrl-C gives up)")
        await asyncio.sleep(0.1)
    others = sum(r.peer_id != agent.peer_id for r in agent.members())
    console.say(f"in contact with {others} other peer{'s' * (others != 1)}")


def _hand_over(endpoint: str, job: SubmitScript, console: Console) -> int:
    """The home's agent already runs: it gets the script, this command shows what comes of it."""
    console.say("this home's agent is running; it gets the script")
    for message in submit_to(endpoint, job):
        if isinstance(message, SubmitEnded):
            return _said_end(message, console)
        console.local(message)
    raise UserError("the agent of this home has gone; its last lines are in agent.log")


def split_words(words: tuple[str, ...]) -> tuple[str | None, str | None, tuple[str, ...]]:
    """[SEED] [SCRIPT [ARGS...]]: a seed has the form of an address, a script is a file."""
    seed: str | None = None
    if words and _is_address(words[0]):
        seed, words = words[0], words[1:]
    if not words:
        return seed, None, ()
    script = words[0]
    if script.startswith("-"):
        raise UserError(f"{script!r} is no option of join; options come before SEED, the script's after SCRIPT")
    if not Path(script).is_file():
        kind = "file" if seed is not None or script.endswith(".py") else "file and no address (tcp://HOST:PORT)"
        raise UserError(f"{script!r} is no {kind}; give the path of a Python script")
    return seed, script, words[1:]


def _is_address(word: str) -> bool:
    return all(re.fullmatch(r"(tcp://)?[^/\s]+:\d+", part) for part in word.split(","))


def _submission(script: str, arguments: tuple[str, ...], seeds: tuple[str, ...], options: dict[str, Any]) -> SubmitScript:
    run = options["run"] or Path(script).stem
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", run):
        raise UserError(f"--run {run!r}: a run's name has letters, digits, '.', '_' and '-', 64 at most")
    return SubmitScript(
        run=run,
        script=str(Path(script).resolve()),
        arguments=arguments,
        quorum=options["quorum"],
        backend=options["backend"],
        min_peers=options["min_peers"],
        checkpoint_every_s=_seconds(options["checkpoint_every"]),
        on_lost=options["on_lost"],
        seeds=seeds,
    )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"--checkpoint-every {text!r}: write 30s, 5m or 1h")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}[match[2]]


def _size(text: str, option: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from None


def _seeds(text: str | None) -> tuple[str, ...]:
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


def _log_to(home: Home, debug: bool) -> None:
    handler = logging.FileHandler(home.root / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("p2p_dmc")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if debug else logging.INFO)


def _run_agent(options: AgentOptions, home: Home, console: Console, work: Work) -> int:
    """The agent's loop until the work is done, Ctrl-C, or somebody makes it leave."""
    try:
        return asyncio.run(_agent_life(options, home, console, work))
    except KeyboardInterrupt:
        return 130


async def _agent_life(options: AgentOptions, home: Home, console: Console, work: Work) -> int:
    agent = Agent(options, home, console.say)
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if agent.leaving.is_set():
            console.say("leaving at once")
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)
            agent.jobs.kill_all()
            raise KeyboardInterrupt
        console.say("leaving (again: at once)")
        agent.leaving.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)
    await agent.start()
    working = asyncio.ensure_future(work(agent))
    leaving = asyncio.create_task(agent.leaving.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        await agent.stop()
        return working.result() if working.done() else 0
    finally:
        working.cancel()
        leaving.cancel()


