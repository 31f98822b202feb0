"""What seed-dataset and join share: where to listen, the home's lock and log, an agent's life in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.home import Home
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.narrator import plural
from p2p_dmc.wire.transport import normalise_address, reachable_host, split_address

Work = Callable[[Agent], Awaitable[int]]

EXIT_INTERRUPTED = 130


def parse_seeds(text: str | None) -> tuple[str, ...]:
    """One address or several, comma-separated."""
    return tuple(normalise_address(part.strip()) for part in (text or "").split(",") if part.strip())


def network_options(
    listen: str | None, advertise: str | None, insecure: bool, console: Console
) -> dict[str, Any]:
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


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def locked(home: Home) -> Iterator[None]:
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


def log_to(home: Home, debug: bool) -> None:
    """agent.log. A full disk costs lines of it, never words on the terminal."""
    logging.raiseExceptions = False
    handler = logging.FileHandler(home.root / "agent.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("p2p_dmc", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("p2p_dmc").setLevel(logging.DEBUG if debug else logging.INFO)


async def say_contact(agent: Agent, seeds: tuple[str, ...], console: Console) -> None:
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


def say_unreadable(store: Store, console: Console) -> None:
    """Data sets of this home that are damaged, or that an older version of the program has made."""
    for folder in store.damaged:
        console.say(
            f"{folder}: a data set that this version of the program cannot read; delete the folder, and seed the data "
            "again or join a peer that has them"
        )


# -- an agent's life ----------------------------------------------------------------------------------------------


def run_agent(options: AgentOptions, home: Home, console: Console, work: Work) -> int:
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
    say_unreadable(agent.store, console)
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
