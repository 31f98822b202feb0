"""join: be this home's agent and train with a script, or give the script to the agent that runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import click

from p2p_dmc.agent.agent import Agent, AgentOptions
from p2p_dmc.agent.client import Submission, ask_local
from p2p_dmc.agent.home import Home
from p2p_dmc.agent.jobs import RunFinishedError
from p2p_dmc.agent.run_files import load_names
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
from p2p_dmc.wire.messages import SubmitEnded, SubmitScript
from p2p_dmc.wire.transport import split_address


def join(*, words: tuple[str, ...], debug: bool, as_json: bool, **options: Any) -> int:
    """`dmc-peer join`: exit code."""
    seed, script, arguments = split_words(words)
    home = Home(options["home"])
    seeds = parse_seeds(seed)
    job = _submission(script or "", arguments, seeds, options) if script or options["attach"] else None
    with Console(as_json) as console:
        running = home.running_agent()
        if running is not None and job is not None:
            return _hand_over(running, job, console)
        if not seeds and not home.known_peers() and job is None:
            raise UserError("nothing to join: give the address of a peer, as `seed-dataset` prints it")
        with locked(home):
            network = network_options(options["listen"], options["advertise"], options["insecure"], console)
            _check_reach(seeds, network)
            log_to(home, debug)
            agent_options = AgentOptions(
                home=home.root,
                name=options["name"] or socket.gethostname(),
                seeds=seeds,
                role=Role.TRAIN if job else Role.STORE,
                capacity_bytes=options["capacity"],
                max_upload=options["max_upload"],
                max_download=options["max_download"],
                domain=home.domain(options["domain"]),
                **network,
            )
            return run_agent(agent_options, home, console, lambda agent: _train(agent, job, seeds, console))


async def _train(agent: Agent, job: SubmitScript | None, seeds: tuple[str, ...], console: Console) -> int:
    console.fact("listening", peer_id=agent.peer_id, name=agent.options.name, address=agent.address)
    console.say(f"peer {agent.peer_id[:8]} ({agent.options.name}) listens at {agent.address}")
    console.narrator.names[agent.peer_id] = agent.options.name
    agent.spawn(say_contact(agent, seeds, console))
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


def _check_reach(seeds: tuple[str, ...], network: dict[str, Any]) -> None:
    """UserError for a peer that listens on loopback only and is to join one elsewhere: that one could not answer."""
    elsewhere = [seed for seed in seeds if not is_loopback(split_address(seed)[0])]
    if elsewhere and is_loopback(network["bind_host"]) and not network["advertise"]:
        raise UserError(
            f"{elsewhere[0]} is on another machine, and this peer would listen on loopback only, where nobody there "
            "can reach it: add --insecure on a network that you trust"
        )
