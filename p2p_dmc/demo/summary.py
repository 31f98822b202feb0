"""What the demo proved: computed from the journals and the final models, then shown."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from p2p_dmc.config import format_size
from p2p_dmc.demo.plan import RUN, Plan
from p2p_dmc.demo.plot import curve, sparkline
from p2p_dmc.demo.story import Outcome
from p2p_dmc.observe.audit import Audit, Line, audit, read_journal

FAULTS_SHOWN = 5
BYTES_PER_PARAMETER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise: kept or not, in words."""

    name: str
    kept: bool
    text: str
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that is shown at the end."""

    plan: Plan
    outcome: Outcome
    audit: Audit
    checks: tuple[Check, ...]
    parameters: int
    bytes_sent: int
    """By all peers in complete rounds, the killed one's included."""
    bytes_ddp: int

    @property
    def ok(self) -> bool:
        return all(check.kept for check in self.checks)


def summarise(plan: Plan, outcome: Outcome) -> Summary:
    """Read what the peers left behind, and judge."""
    homes = list(outcome.homes.values())
    judged = audit(homes, RUN)
    models = {
        name: home / "runs" / RUN / "final" / "model.safetensors" for name, home in outcome.homes.items()
    }
    parameters = count_parameters(next((p for p in models.values() if p.exists()), None))
    return Summary(
        plan=plan,
        outcome=outcome,
        audit=judged,
        checks=(
            _equal(judged, models),
            _exact(judged, plan),
            _killed(outcome),
            _noticed(outcome),
            _returned(outcome),
        ),
        parameters=parameters,
        bytes_sent=sum(line["bytes_sent"] for lines in _all_rounds(homes) for line in lines),
        bytes_ddp=ddp_bytes(judged.rounds, parameters, plan.batch_size),
    )


def _all_rounds(homes: Sequence[Path]) -> list[tuple[Line, ...]]:
    return [read_journal(home, RUN).rounds for home in homes]


def count_parameters(model: Path | None) -> int:
    """Numbers in a safetensors file; 0 without one."""
    if model is None:
        return 0
    from safetensors import safe_open

    with safe_open(model, framework="np") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


def ddp_bytes(rounds: Sequence[Line], parameters: int, batch_size: int) -> int:
    """What DistributedDataParallel would have sent for the same steps on the same peers.

    A ring all-reduce of the gradients in every step: each of n peers sends 2(n-1)/n x 4 bytes x parameters. A
    round of ``samples_round`` samples on n peers is samples_round / (n x batch size) steps.
    """
    total = 0
    for line in rounds:
        n = line["members"]
        steps = math.ceil(line["samples_round"] / (n * batch_size))
        total += steps * 2 * (n - 1) * BYTES_PER_PARAMETER * parameters
    return total


# -- checks --------------------------------------------------------------------------------------------------


def _equal(judged: Audit, models: Mapping[str, Path]) -> Check:
    digests = {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in models.items() if p.exists()}
    faults = list(judged.unequal)
    faults += [f"{name} has no final model" for name in models if name not in digests]
    if len(set(digests.values())) > 1:
        faults.append("the final models differ: " + ", ".join(f"{n} {d[:12]}" for n, d in digests.items()))
    if not judged.compared:
        faults.append("no two peers completed the same round")
    text = (
        f"equal parameters on all peers in each of {judged.compared} rounds that they share, and at the end"
    )
    return Check(name="equal", kept=not faults, text=text, faults=tuple(faults))


def _exact(judged: Audit, plan: Plan) -> Check:
    faults = list(judged.inexact)
    if judged.finished_epochs < plan.epochs:
        faults.append(f"only {judged.finished_epochs} of {plan.epochs} epochs are finished")
    text = (
        f"every sample of {judged.finished_epochs} epochs counted exactly once "
        f"({judged.samples_counted:,} of {judged.samples_due:,})"
    )
    return Check(name="exact", kept=not faults, text=text, faults=tuple(faults))


def _killed(outcome: Outcome) -> Check:
    faults = []
    if len(outcome.killed_pids) < 2:
        faults.append(f"only processes {list(outcome.killed_pids)} were there to kill: no trainer")
    if outcome.left_running:
        faults.append(f"processes {list(outcome.left_running)} survived their SIGKILL")
    text = f"{outcome.victim} was killed, agent and trainer"
    return Check(name="killed", kept=not faults, text=text, faults=tuple(faults))


def _noticed(outcome: Outcome) -> Check:
    survivors = set(outcome.homes) - {outcome.victim}
    dead = [
        n
        for n in outcome.notices
        if n.event == "member"
        and n.facts["subject"] == outcome.victim
        and n.facts["state"] == "DEAD"
        and n.time >= outcome.killed_s
    ]
    views = [n for n in outcome.notices if n.event == "view" and set(n.facts["members"]) == survivors]
    faults = []
    if not dead:
        faults.append(f"no survivor ever said that {outcome.victim} is dead")
    if not any(view.time >= outcome.killed_s for view in views):
        faults.append(f"there was never a view of {', '.join(sorted(survivors))} alone")
    after = f"{dead[0].time - outcome.killed_s:.2f} s after the kill" if dead else "never"
    return Check(
        name="noticed", kept=not faults, text=f"the survivors noticed, {after}", faults=tuple(faults)
    )


def _returned(outcome: Outcome) -> Check:
    faults = () if outcome.trained_again_s else (f"{outcome.victim} completed no round after its return",)
    seconds = outcome.trained_again_s - outcome.returned_s
    text = f"{outcome.victim} came back and trained again, {seconds:.1f} s after its start"
    return Check(name="returned", kept=not faults, text=text, faults=faults)


# -- as facts ------------------------------------------------------------------------------------------------


def takeovers(outcome: Outcome) -> list[dict[str, Any]]:
    """What was taken over from the victim at its death: by whom, how many files, from how many shards."""
    taken = [n for n in outcome.notices if n.event == "takeover" and n.time >= outcome.killed_s]
    first_view = min((n.facts["view_epoch"] for n in taken), default=0)
    return [
        {key: n.facts[key] for key in ("from", "to", "samples", "shards")}
        for n in taken
        if n.facts["from"] == outcome.victim and n.facts["view_epoch"] == first_view
    ]


def round_seconds(summary: Summary) -> float:
    """Median time from one round to the next before the kill."""
    times = [line["time"] for line in summary.audit.rounds if line["time"] < summary.outcome.killed_s]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return median(gaps) if gaps else 0.0


def losses(summary: Summary) -> list[float]:
    return [line["loss"] for line in summary.audit.rounds if line["loss"] is not None]


def smooth_losses(summary: Summary) -> list[float]:
    """Each round's loss averaged with its neighbours': an epoch's last round has few samples, so much noise."""
    lines = [line for line in summary.audit.rounds if line["loss"] is not None]
    smoothed = []
    for i in range(len(lines)):
        near = lines[max(0, i - 1) : i + 2]
        total = sum(line["samples_round"] for line in near)
        smoothed.append(sum(line["loss"] * line["samples_round"] for line in near) / total)
    return smoothed


def facts(summary: Summary) -> dict[str, Any]:
    """The summary as one JSON object."""
    outcome, judged = summary.outcome, summary.audit
    curve_of_loss = losses(summary)
    return {
        "event": "summary",
        "ok": summary.ok,
        "checks": {check.name: check.kept for check in summary.checks},
        "faults": [fault for check in summary.checks for fault in check.faults],
        "seconds": round(outcome.ended_s - outcome.began_s, 1),
        "seed": summary.plan.seed,
        "peers": summary.plan.peers,
        "files": outcome.files,
        "shards": outcome.shards,
        "parameters": summary.parameters,
        "epochs": judged.finished_epochs,
        "rounds": len(judged.rounds),
        "rounds_compared": judged.compared,
        "samples_counted": judged.samples_counted,
        "samples_due": judged.samples_due,
        "loss_first": curve_of_loss[0] if curve_of_loss else None,
        "loss_last": curve_of_loss[-1] if curve_of_loss else None,
        "loss": curve_of_loss,
        "tau": [line["tau"] for line in judged.rounds],
        "bytes_sent": summary.bytes_sent,
        "bytes_ddp": summary.bytes_ddp,
        "seeder_left_at_s": round(outcome.seeder_left_s - outcome.began_s, 3),
        "killed": outcome.victim,
        "killed_at_s": round(outcome.killed_s - outcome.began_s, 3),
        "killed_at_samples": outcome.killed_at_samples,
        "recovery_s": {n: round(s - outcome.killed_s, 3) for n, s in sorted(outcome.recovered_s.items())},
        "round_s": round(round_seconds(summary), 3),
        "returned_at_s": round(outcome.returned_s - outcome.began_s, 3),
        "trained_again_after_s": round(outcome.trained_again_s - outcome.returned_s, 3)
        if outcome.trained_again_s
        else None,
        "takeovers": takeovers(outcome),
    }


# -- for people ----------------------------------------------------------------------------------------------


def report(summary: Summary, *, plain: bool) -> list[str]:
    """The summary in lines of text. ``plain``: ASCII only."""
    outcome, judged = summary.outcome, summary.audit
    lines = ["", f"loss over {len(judged.rounds)} rounds (smoothed over three, weighted by samples)", ""]
    lines += curve(smooth_losses(summary), marks=_marks(summary), plain=plain)
    taus = [line["tau"] for line in judged.rounds]
    moved = f"from {taus[0]} to {taus[-1]}" if taus else "no round"
    lines += ["", f"tau over rounds   {'' if plain else sparkline(taus, 40) + '  '}{moved}"]
    share = summary.bytes_ddp / summary.bytes_sent if summary.bytes_sent else 0.0
    lines += [
        f"bytes sent        {format_size(summary.bytes_sent)} by all peers together",
        f"DDP would send    {format_size(summary.bytes_ddp)} for the same steps, {share:.1f} times as much:",
        f"                  2(n-1)/n x 4 bytes x {summary.parameters:,} parameters per step and peer",
    ]
    for taken in takeovers(outcome):
        shards = f"{taken['shards']} shard{'s' * (taken['shards'] != 1)}"
        lines.append(
            f"taken over        by {taken['to']}: {taken['samples']} of {taken['from']}'s files, from {shards}"
        )
    recovery = ", ".join(f"{n} {s - outcome.killed_s:.2f} s" for n, s in sorted(outcome.recovered_s.items()))
    lines += [
        f"kill to round     {recovery}",
        f"                  (a round took {round_seconds(summary):.2f} s before the kill)",
        "",
    ]
    return [*lines, *_check_lines(summary, plain)]


def _marks(summary: Summary) -> dict[int, str]:
    """Where in the loss curve the victim was killed and came back."""
    outcome = summary.outcome
    moments = {"killed": outcome.killed_s, "back": outcome.trained_again_s}
    times = [line["time"] for line in summary.audit.rounds if line["loss"] is not None]
    marks = {}
    for word, moment_s in moments.items():
        index = next((i for i, time_s in enumerate(times) if time_s >= moment_s), None)
        if moment_s and index is not None:
            marks[index] = f"{outcome.victim} {word}"
    return marks


def _check_lines(summary: Summary, plain: bool) -> list[str]:
    good, bad = ("ok  ", "FAIL") if plain else ("✓", "✗")
    lines = []
    for check in summary.checks:
        lines.append(f"{good if check.kept else bad} {check.text}")
        lines += [f"    {fault}" for fault in check.faults[:FAULTS_SHOWN]]
        if len(check.faults) > FAULTS_SHOWN:
            lines.append(f"    and {len(check.faults) - FAULTS_SHOWN} more")
    return lines
