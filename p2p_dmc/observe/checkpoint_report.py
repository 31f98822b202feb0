"""`dmc-peer checkpoint`: the checkpoints of a home, listed or verified, without an agent."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console as Terminal
from rich.text import Text

from p2p_dmc.agent.checkpoints import (
    CheckpointRef,
    list_checkpoints,
    unfinished_checkpoints,
    verify_checkpoint,
)
from p2p_dmc.agent.home import Home
from p2p_dmc.config import format_size
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.observe.narrator import plural, printable
from p2p_dmc.observe.reports import Facts, cells, show, table_of

UNFINISHED = "its writing did not come to its end, or goes on now"


def checkpoint(home: Path, run: str, as_json: bool, *, verify: bool) -> int:
    """`dmc-peer checkpoint [verify]`: exit code, 1 when a checkpoint is damaged."""
    facts = gather(Home(home), run, verify=verify)
    if as_json:
        print(json.dumps(facts))
    else:
        show(render, facts)
    return int(any(c["state"] == "damaged" for r in facts["runs"] for c in r["checkpoints"]))


def gather(home: Home, run: str, *, verify: bool) -> Facts:
    """Of each run, or the one named, its checkpoints, newest first; ``verify`` reads them whole."""
    if not home.root.is_dir():
        raise UserError(f"{home.root} is no home of a peer; give its --home")
    folders = {folder.name: folder for folder in sorted((home.root / "runs").glob("*")) if folder.is_dir()}
    if run and run not in folders:
        known = f"it has {', '.join(folders)}" if folders else "it has none"
        raise UserError(f"no run {run!r} in {home.root}: {known}")
    return {
        "home": str(home.root),
        "verified": verify,
        "runs": [_run(name, folders[name], verify) for name in ([run] if run else folders)],
    }


def _run(name: str, folder: Path, verify: bool) -> Facts:
    found = []
    for ref in list_checkpoints(folder):
        facts = _checkpoint(ref, verify)
        if ref.folder.exists():  # an agent that runs here may have dropped it meanwhile
            found.append(facts)
    found += [
        {"path": str(path), "state": "unfinished", "problem": UNFINISHED}
        for path in unfinished_checkpoints(folder)
    ]
    return {"run": name, "checkpoints": found}


def _checkpoint(ref: CheckpointRef, verify: bool) -> Facts:
    """Without ``verify`` the state of one that can be read is "listed"."""
    ledger, state, problem = None, "damaged" if ref.problem else "listed", ref.problem
    try:
        if verify:
            ledger, state = verify_checkpoint(ref), "whole"
        elif not problem:
            ledger = Ledger.from_bytes((ref.folder / "ledger.msgpack").read_bytes())
    except (ValueError, OSError, RemoteProtocolError) as error:
        state, problem = "damaged", str(error)
    return {
        "path": str(ref.folder),
        "state": state,
        "problem": problem,
        "view_epoch": ref.lineage[0],
        "round": ref.lineage[1],
        "closed": ref.meta.get("closed"),
        "history": ref.meta.get("history"),
        "digest": ref.meta.get("anchor_digest"),
        "epoch": ledger.epoch if ledger is not None else None,
        "epochs": ledger.epochs if ledger is not None else None,
        "samples_total": ledger.samples_total if ledger is not None else None,
        **_on_disk(ref.folder),
    }


def _on_disk(folder: Path) -> Facts:
    """Size and time (unix seconds) of its newest file."""
    try:
        stats = [file.stat() for file in folder.iterdir()]
    except OSError:
        stats = []
    return {
        "size_bytes": sum(s.st_size for s in stats),
        "written": round(max((s.st_mtime for s in stats), default=0.0), 3),
    }


def render(facts: Facts, terminal: Terminal) -> None:
    """A table of what can be read, a line for each that cannot, and what they come to."""
    found = [(run["run"], c) for run in facts["runs"] for c in run["checkpoints"]]
    if not found:
        terminal.print(Text(printable(f"no checkpoint in {facts['home']}")))
        return
    rows = table_of("RUN", "VIEW", "ROUND", "EPOCH", "SAMPLES", "SIZE", "WRITTEN", "STATE")
    for run, one in found:
        if one["state"] != "unfinished":
            rows.add_row(*cells(run, one["view_epoch"], one["round"], *_cells(one)))
    if rows.rows:
        terminal.print(rows)
    for run, one in found:
        if one["problem"]:
            terminal.print(Text(printable(f"run {run}: {one['path']} is {one['state']}: {one['problem']}")))
    if facts["verified"]:
        damaged = sum(one["state"] == "damaged" for _, one in found)
        whole = sum(one["state"] == "whole" for _, one in found)
        terminal.print(f"{plural(whole, 'checkpoint')} whole, {damaged} damaged")


def _cells(one: Facts) -> list[Any]:
    epoch = None
    if one["epoch"] is not None:
        epoch = f"{min(one['epoch'] + 1, one['epochs'])} of {one['epochs']}"
    state = one["state"] if one["state"] != "listed" else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["written"]))
    words = [state, "stopped here" if one["closed"] else ""]
    size = format_size(one["size_bytes"])
    return [epoch, one["samples_total"], size, written, ", ".join(w for w in words if w)]
