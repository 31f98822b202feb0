"""An operator says at one peer that another is gone for good, so that nobody waits for it (DESIGN.md section 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.run_files import load_names
from p2p_dmc.agent.waiting import waiting
from p2p_dmc.core.membership import MemberState
from p2p_dmc.errors import UserError

if TYPE_CHECKING:
    from p2p_dmc.agent.agent import Agent
    from p2p_dmc.agent.requests import Requests
    from p2p_dmc.agent.run import Run


def evict(requests: Requests, agent: Agent, arguments: tuple[str, ...], *, ask_only: bool) -> dict[str, Any]:
    """(peer, run): evict it, or with ``ask_only`` say whether that could be; UserError with the remedy if not."""
    text, name = (*arguments, "", "")[:2]
    run = _run(requests, agent, name)
    if isinstance(run, dict):
        return run | {"peer": text}
    names = load_names(run.folder)
    peer_id = requests.peer(text, names)
    record = run.services.record(peer_id)
    called = f"{record.name if record is not None else names.get(peer_id, '')} ({peer_id[:8]})"
    if peer_id == agent.peer_id:
        raise UserError(f"{called} is the peer that you ask; `dmc-peer leave` makes it leave")
    if record is not None and record.state is MemberState.ALIVE:
        raise UserError(f"{called} is here; `dmc-peer leave {peer_id[:8]}` makes it leave")
    if record is not None and record.state is MemberState.SUSPECT:
        raise UserError(f"{called} has been silent for a moment only; ask again in a few seconds")
    agreement = run.agreement
    awaited = agreement.awaited if agreement is not None else ()
    if agreement is None or peer_id not in awaited:
        reason = waiting(run) or ("it goes on" if run.view is not None else "its trainer starts")
        raise UserError(f"run {run.name!r} does not wait for {called}: {reason}")
    history = run.history.hex()  # alone, what follows has it replaced at once
    if not ask_only:
        run.event("evict_asked", peer_id=peer_id)
        run.act(agreement.evict(peer_id, now_ms()))
    others = [p for p in awaited if p not in (peer_id, *agreement.evicted)]
    return {
        "run": run.name,
        "peer_id": peer_id,
        "name": called,
        "history": history,
        "waits_for": [f"{names.get(p, '')} ({p[:8]})".strip() for p in others],
    }


def _run(requests: Requests, agent: Agent, name: str) -> Run | dict[str, Any]:
    """The run that is meant, if this peer trains in it; else whom to ask."""
    mine = [r for r in agent.runs.values() if not r.end.outcome and name in ("", r.name)]
    if len(mine) == 1:
        return mine[0]
    others = [r for r in requests.other_runs() if name in ("", r["run"])]
    if not mine and len(others) == 1:
        return {"run": others[0]["run"], "ask": others[0]["ask"]}
    names = sorted({r.name for r in mine} | {r["run"] for r in others})
    if not names:
        raise UserError(
            f"no run{f' {name!r}' if name else ''} is under way here; `dmc-peer status` lists them"
        )
    raise UserError(f"runs {', '.join(names)} are under way; choose one with --run")
