"""status, placement, leave, stop, evict: what another process asks an agent, and how a person sees the answer."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from p2p_dmc.agent.client import TIMEOUT_S, NoAnswerError, ask, ask_local
from p2p_dmc.agent.home import Home
from p2p_dmc.config import format_size
from p2p_dmc.errors import UserError
from p2p_dmc.observe.narrator import labels, plural, printable

Facts = dict[str, Any]

PIPE_COLUMNS = 10_000
"""Nothing is cut or folded where no terminal has a width."""
LOOK_EVERY_S = 0.2
PATIENCE_S = 2.0
STOP_WAIT_S = 300.0
"""A run stops at the end of its round, which slow machines may take minutes for."""
EVICT_WAIT_S = 30.0
"""The others of a run agree within a few round trips, once silence has been noticed everywhere."""
LEAVE_WAIT_S = 60.0
"""Ending trainers and handing over shards are bounded by less."""
MOST_HOPS = 3
MOST_SHARDS = 64
"""Of a data set with more, only those that are not where they should be are shown, and no more of them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The agent that answers: at one of ``addresses``, or at ``endpoint`` on this machine."""

    addresses: tuple[str, ...] = ()
    endpoint: str = ""

    @staticmethod
    def at(seed: str | None, home: Path) -> Asked:
        """The agent at SEED, or without one the home's; UserError when that does not run."""
        if seed:
            return Asked(addresses=tuple(part.strip() for part in seed.split(",")))
        running = Home(home).running_agent()
        if running is None:
            raise UserError(f"no agent of {home} runs; give the address of a peer, or its --home")
        return Asked(endpoint=str(running["endpoint"]))

    def ask(self, command: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Facts:
        if self.endpoint:
            return ask_local(self.endpoint, command, arguments, timeout_s=timeout_s)
        return ask(self.addresses, command, arguments, timeout_s=timeout_s)

    def follow(self, command: str, *arguments: str, by: tuple[str, ...]) -> tuple[Asked, Facts]:
        """Ask, and ask whom the answer names instead (then with the facts ``by``); who answered, and what."""
        asked, facts = self, self.ask(command, *arguments)
        for _ in range(MOST_HOPS):
            if "ask" not in facts:
                return asked, facts
            asked = Asked(addresses=(str(facts["ask"]),))
            facts = asked.ask(command, *(str(facts[key]) for key in by))
        raise UserError(
            f"the peers pass the question on and on, last to {asked.addresses[0]}; ask again in a moment"
        )


# -- status -------------------------------------------------------------------------------------------------------


def status(seed: str | None, home: Path, as_json: bool) -> None:
    """`dmc-peer status`."""
    facts = gather(Asked.at(seed, home))
    if as_json:
        print(json.dumps(facts))
    else:
        show(render_status, facts)


def gather(asked: Asked) -> Facts:
    """An agent's status, with what the peers that train them say of runs in which it takes no part."""
    facts = asked.ask("status")
    facts["runs"] = [_from_trainer(run) if "ask" in run else run for run in facts["runs"]]
    for dataset in facts["datasets"]:
        dataset["progress"] = [
            {"run": run["run"], "epoch": run["epoch"], "epochs": run["epochs"], **run["epoch_progress"]}
            | ({"mixture": run["dataset_name"]} if run.get("dataset") != dataset["dataset"] else {})
            for run in facts["runs"]
            if dataset["dataset"] in (run.get("dataset"), *(part["dataset"] for part in run.get("parts", ())))
        ]
    return facts


def _from_trainer(run: Facts) -> Facts:
    try:
        there = ask([run["ask"]], "status", timeout_s=PATIENCE_S)["runs"]
    except UserError:
        return run
    return next((r for r in there if r["run"] == run["run"] and "ask" not in r), run)


def render_status(facts: Facts, terminal: Terminal) -> None:
    """Three tables; a run that stands still says why below its own."""
    names = labels(facts["members"])
    members = table_of("PEER", "ID", "STATE", "ROLE", "ADDRESS")
    for m in facts["members"]:
        members.add_row(*cells(m["name"], m["peer_id"][:8], m["state"].lower(), m["role"], m["address"]))
    terminal.print(members)
    if facts["runs"]:
        terminal.print()
        _render_runs(facts["runs"], names, terminal)
    for dataset in facts["datasets"]:
        terminal.print()
        _render_dataset(dataset, names, terminal)
    if not facts["datasets"]:
        terminal.print("\nno data set is known here yet")


def _render_runs(runs: list[Facts], names: dict[str, str], terminal: Terminal) -> None:
    table = table_of("RUN", "VIEW", "ROUND", "TAU", "LOSS", "EPOCH", "DONE", "SAMPLES", "COMMITTED", "PEERS")
    for run in runs:
        if "ask" in run:
            table.add_row(*cells(run["run"], run["view_epoch"], *[None] * 7, f"ask {run['ask']}"))
            continue
        table.add_row(
            *cells(
                run["run"],
                run["view_epoch"],
                run["round"],
                run["tau"],
                None if run["loss"] is None else f"{run['loss']:.4f}",
                *_epoch_cells(run),
                run["samples_total"],
                None if run["committed"] is None else lineage(run["committed"]),
                ", ".join(
                    [names.get(p, p[:8]) for p in run["members"]]
                    + [f"{names.get(p, p[:8])} (catching up)" for p in run["learners"]]
                ),
            )
        )
    terminal.print(table)
    for run in runs:
        if run.get("outcome") or run.get("stopping"):
            terminal.print(Text(printable(f"run {run['run']} {_end_in_words(run, names)}")))
        if run.get("waiting"):
            terminal.print(Text(printable(f"run {run['run']} waits: {run['waiting']}")))


def _end_in_words(run: Facts, names: dict[str, str]) -> str:
    """What has become of a run that is over on the peer that was asked, or is being stopped; for whom it waits."""
    waits_for, not_heard = (
        ", ".join(names.get(p, p[:8]) for p in run.get(key) or ())
        for key in ("stop_waits_for", "stop_not_heard")
    )
    if not run["outcome"]:
        return "stops at the end of its round" + (f"; waiting for {waits_for}" if waits_for else "")
    if waits_for:
        return f"is stopped on the peer asked; waiting for word that {waits_for} stopped, too"
    unheard = f", and no word came that {not_heard} stopped at the same round" if not_heard else ""
    return f"is over on the peer asked: {run['outcome']}{unheard}"


def _epoch_cells(run: Facts) -> tuple[str | None, str | None]:
    """Which epoch, counted from one, and how much of it is done."""
    epoch, epochs, progress = run["epoch"], run["epochs"], run["epoch_progress"]
    if epoch is None:
        return None, None
    if epoch >= epochs:
        return f"{epochs} of {epochs}", "100%"
    share = (progress["counted"] + progress["skipped"]) / max(1, progress["total"])
    skipped = f", {progress['skipped']} skipped" if progress["skipped"] else ""
    return f"{epoch + 1} of {epochs}", f"{share:.0%}{skipped}"


def _render_dataset(dataset: Facts, names: dict[str, str], terminal: Terminal) -> None:
    lines = [
        f"data set {dataset['name']} {dataset['dataset'][:12]}: {plural(dataset['samples'], 'sample')} in "
        f"{plural(dataset['shards'], 'shard')}, {format_size(dataset['size_bytes'])}; "
        f"{plural(dataset['replicas'], 'replica')} wanted, under-replicated {dataset['under_replicated']}, "
        f"lost {dataset['lost']}"
    ]
    for p in dataset["progress"]:
        where = f"epoch {p['epoch'] + 1} of {p['epochs']}, {p['counted']} of {p['total']} samples counted"
        skipped = f", {p['skipped']} skipped" if p["skipped"] else ""
        done = f"all of {plural(p['epochs'], 'epoch')} done"
        mixed = f" on {p['mixture']}" if "mixture" in p else ""
        lines.append(f"run {p['run']}{mixed}: {done if p['epoch'] >= p['epochs'] else where + skipped}")
    terminal.print(Text(printable("\n".join(lines))))
    holders = table_of("HOLDER", "SHARDS")
    for peer_id, count in dataset["holders"].items():
        holders.add_row(*cells(names.get(peer_id, peer_id[:8]), count))
    terminal.print(holders)


def lineage(pair: Iterable[int]) -> str:
    """ "3.41": view epoch and round."""
    return ".".join(map(str, pair))


# -- placement ----------------------------------------------------------------------------------------------------


def placement(seed: str | None, home: Path, without: tuple[str, ...], as_json: bool) -> None:
    """`dmc-peer placement`."""
    facts = Asked.at(seed, home).ask("placement", *without)
    if as_json:
        print(json.dumps(facts))
    else:
        show(render_placement, facts)


def render_placement(facts: Facts, terminal: Terminal) -> None:
    """Per data set: each shard's holders, and with --without what would move to whom."""
    names = labels({"peer_id": peer_id, "name": name} for peer_id, name in facts["names"].items())

    def called(peers: Iterable[str]) -> str:
        return ", ".join(names.get(p, p[:8]) for p in peers) or "nobody"

    for number, dataset in enumerate(facts["datasets"]):
        if number:
            terminal.print()
        shards = dataset["shards"]
        short_of = [s for s in shards if not set(s["should"]) <= set(s["does"])]
        heading = (
            f"data set {dataset['name']} {dataset['dataset'][:12]}: {plural(len(shards), 'shard')}, "
            f"{format_size(dataset['size_bytes'])}, {plural(dataset['replicas'], 'replica')} wanted; "
            f"{len(short_of)} not yet where they should be\n"
            f"under-replicated {dataset['under_replicated']}, in flight {dataset['in_flight']}, "
            f"not verified yet {dataset['unverified']}, lost {dataset['lost']}"
        )
        terminal.print(Text(printable(heading)))
        if dataset["dissenters"]:
            terminal.print(Text(printable(f"placed otherwise by {called(dataset['dissenters'])}")))
        _render_peers(dataset["peers"], names, terminal)
        shown = shards if len(shards) <= MOST_SHARDS else short_of[:MOST_SHARDS]
        table = table_of("SHARD", "SAMPLES", "SIZE", "SHOULD HOLD", "HOLD")
        for s in shown:
            size = format_size(s["size_bytes"])
            table.add_row(*cells(s["shard"][:12], s["samples"], size, called(s["should"]), called(s["does"])))
        if shown:
            terminal.print(table)
        if len(shown) < len(shards):
            terminal.print(Text(f"{len(shards) - len(shown)} more shards: --json lists all"))
        if facts["without"]:
            terminal.print(Text(printable(f"without {called(facts['without'])}:")))
            _render_moves(dataset["moves"], names, terminal)
    for domain in sorted(set(facts["domains"].values())):
        peers = sorted(
            (p for p, of in facts["domains"].items() if of == domain), key=lambda p: names.get(p, p)
        )
        terminal.print(Text(printable(f"domain {domain}: {called(peers)}")))
    if not facts["datasets"]:
        terminal.print("no data set is known here yet")


def _render_peers(peers: list[Facts], names: dict[str, str], terminal: Terminal) -> None:
    """What each holds and should hold, in shards and bytes."""
    table = table_of("PEER", "HOLDS", "SIZE", "SHOULD HOLD", "SIZE", "TO COME", "SIZE", "")
    for p in peers:
        notes = [f"{p['unverified']} not verified yet"] * bool(p["unverified"]) + ["no room"] * bool(
            p["full"]
        )
        row = [names.get(p["peer_id"], p["peer_id"][:8])]
        for what in ("held", "placed", "to_come"):
            row += [p[what], format_size(p[f"{what}_bytes"])]
        table.add_row(*cells(*row, ", ".join(notes)))
    terminal.print(table)


def _render_moves(moves: list[Facts], names: dict[str, str], terminal: Terminal) -> None:
    shards: Counter[str] = Counter(m["to"] for m in moves)
    sizes: Counter[str] = Counter()
    for m in moves:
        sizes[m["to"]] += m["size_bytes"]
    table = table_of("WOULD FETCH", "SHARDS", "SIZE")
    for peer_id in sorted(shards):
        table.add_row(*cells(names.get(peer_id, peer_id[:8]), shards[peer_id], format_size(sizes[peer_id])))
    terminal.print(table if moves else "  nothing would move")


# -- stop and leave -----------------------------------------------------------------------------------------------


def stop(seed: str | None, home: Path, run: str, as_json: bool) -> None:
    """`dmc-peer stop`: ask, and wait until the run is over, and its peers have heard so of each other."""
    asked, facts = Asked.at(seed, home).follow("stop", run, by=("run",))
    name = str(facts["run"])
    last: Facts = {}

    def ended() -> Facts | None:
        """The run's facts once it is over, or the last ones when its peers have gone."""
        nonlocal asked, last
        try:
            found = _run_of(asked.ask("status", timeout_s=PATIENCE_S), name)
        except NoAnswerError:
            return last if last.get("outcome") else _ended_elsewhere(last) or last
        last = found or last
        return last if found is None or (found["outcome"] and not found.get("stop_waits_for")) else None

    def progress() -> str:
        return f"run {name!r} {_end_in_words(last or {'outcome': ''}, last.get('names', {}))}"

    result = _wait(ended, STOP_WAIT_S, progress)
    if result is None and last.get("outcome"):
        result = last
    if result is None:
        raise UserError(
            f"run {name!r} was asked to stop and has not within {STOP_WAIT_S:g} s; see `dmc-peer status`"
        )
    _report_stop(name, result, as_json)


def _run_of(facts: Facts, name: str) -> Facts | None:
    """A run as one of its own peers sees it, with where its other peers are."""
    address_of = {m["peer_id"]: m["address"] for m in facts["members"]}
    for run in facts["runs"]:
        if run["run"] == name and "ask" not in run:
            addresses = [address_of[p] for p in run["members"] if p in address_of]
            return {**run, "addresses": addresses, "names": labels(facts["members"])}
    return None


def _ended_elsewhere(last: Facts) -> Facts | None:
    """The peer that was asked has gone: how the run ended for one that is still there."""
    for address in last.get("addresses", []):
        try:
            run = _run_of(ask([address], "status", timeout_s=1.0), last["run"])
        except UserError:
            continue
        if run is not None and run["outcome"]:
            return run
    return None


def _report_stop(name: str, run: Facts, as_json: bool) -> None:
    outcome = run.get("outcome") or "gone"
    view_epoch, number = run.get("lineage") or (None, None)
    if as_json:
        facts = {"run": name, "outcome": outcome, "view_epoch": view_epoch, "round": number}
        told = ("digest", "epoch", "epochs", "samples_total", "stop_not_heard")
        print(json.dumps(facts | {k: run.get(k) for k in told}))
    elif outcome in ("stopped", "finished"):
        print(
            printable(
                f"run {name!r} is {outcome} at view {view_epoch} round {number}, after {run['samples_total']} samples"
                + ("; the same join command goes on from there" if outcome == "stopped" else "")
            )
        )
        if not_heard := ", ".join(run["names"].get(p, p[:8]) for p in run.get("stop_not_heard") or ()):
            unheard = f"no word came that {not_heard} stopped at the same round"
            print(printable(f"{unheard}: all peers of the last view are needed to go on"))
    if outcome not in ("stopped", "finished"):
        raise UserError(f"run {name!r} ended otherwise: {outcome}; see events.jsonl of its peers")


def leave(peer: str | None, home: Path, as_json: bool) -> None:
    """`dmc-peer leave`: ask, and wait until the peer has left."""
    seed = peer if peer and peer.startswith("tcp://") and Home(home).running_agent() is None else None
    asked = Asked.at(seed, home)
    leaving, facts = asked.follow("leave", "" if seed else peer or "", by=("peer_id",))

    def left() -> bool | None:
        if leaving == asked:
            return _gone(asked, home) or None
        members = asked.ask("status", timeout_s=PATIENCE_S)["members"]
        states = {m["peer_id"]: m["state"] for m in members}
        return True if states.get(facts["peer_id"], "LEFT") == "LEFT" else None

    name = f"{facts['name']} ({facts['peer_id'][:8]})"
    if not _wait(left, LEAVE_WAIT_S, f"{name} ends its trainers and hands over its shards"):
        raise UserError(f"{name} was asked to leave and has not within {LEAVE_WAIT_S:g} s; see its agent.log")
    if as_json:
        print(json.dumps({"peer_id": facts["peer_id"], "name": facts["name"], "state": "LEFT"}))
    else:
        print(printable(f"{name} has left"))


def evict(peer: str, home: Path, run: str, as_json: bool, yes: bool) -> None:
    """`dmc-peer evict`: ask, and wait until the run goes on, or say for whom it still waits."""
    asked, facts = Asked.at(None, home).follow("evict?", peer, run, by=("peer", "run"))
    name, called = facts["run"], facts["name"]
    if not yes:
        _confirm(
            f"run {name!r} goes on without {called}. What only it has trained is lost, and should it still run "
            "somewhere, it has to give that up"
        )
    facts = asked.ask("evict", facts["peer_id"], name)

    def goes_on() -> Facts | None:
        now = _run_of(asked.ask("status", timeout_s=PATIENCE_S), name)
        return now if now is None or now["history"] not in (None, facts["history"]) else None

    after = None
    if not facts["waits_for"]:
        after = _wait(goes_on, EVICT_WAIT_S, f"the peers of run {name!r} agree to go on without {called}")
    told = {k: facts[k] for k in ("run", "peer_id", "name", "waits_for")}
    if as_json:
        print(json.dumps(told | {"parent": facts["history"], "history": after["history"] if after else None}))
    elif facts["waits_for"]:
        print(printable(f"{called} is evicted; run {name!r} still waits for {', '.join(facts['waits_for'])}"))
    elif after is not None:
        print(
            printable(
                f"{called} is evicted; run {name!r} goes on with {plural(len(after['members']), 'peer')}"
            )
        )
    if not facts["waits_for"] and after is None:
        raise UserError(f"{called} is evicted, and run {name!r} does not go on yet; see `dmc-peer status`")


def _confirm(what: str) -> None:
    """UserError unless a person at the terminal says yes."""
    if not sys.stdin.isatty():
        raise UserError(f"{what}; say --yes if that is meant")
    print(printable(f"{what}.\nGo on? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nobody was evicted")


def _gone(asked: Asked, home: Path) -> bool:
    """Whether the agent that was asked to leave has ended."""
    if asked.endpoint:
        running = Home(home).running_agent()
        return running is None or running["endpoint"] != asked.endpoint
    try:
        asked.ask("status", timeout_s=1.0)
    except NoAnswerError:
        return True
    return False


# -- what they share ----------------------------------------------------------------------------------------------


def _wait(look: Callable[[], Any], limit_s: float, what: str | Callable[[], str]) -> Any:
    """The first answer of ``look`` that is not None; None after ``limit_s``. Says ``what`` takes time, if it does."""
    started_s, said_s = time.monotonic(), 0.0
    while (answer := look()) is None:
        now_s = time.monotonic()
        if now_s - started_s > limit_s:
            return None
        if now_s - max(started_s, said_s) > (PATIENCE_S if not said_s else 10.0):
            said_s = now_s
            said = what if isinstance(what, str) else what()
            print(printable(f"{said}; {now_s - started_s:.0f} s so far"), file=sys.stderr)
        time.sleep(LOOK_EVERY_S)
    return answer


def show(render: Callable[[Facts, Terminal], None], facts: Facts) -> None:
    """Print to the terminal as wide as it is, to a pipe as wide as it takes."""
    is_terminal = sys.stdout.isatty()
    terminal = Terminal(width=None if is_terminal else PIPE_COLUMNS, highlight=False, markup=False)
    with terminal.capture() as captured:
        render(facts, terminal)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
    sys.stdout.flush()


def table_of(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def cells(*values: object) -> list[Text]:
    return [Text("-" if value is None or value == "" else printable(str(value))) for value in values]
