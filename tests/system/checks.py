"""What must hold of a run when it is over, read from the homes of all its peers (DESIGN.md section 4).

`observe.audit` compares rounds and views and replays the ledger; here is what a test asks beyond that: that the
journals agree with the final ledger and with each other's assignments, and that no round was written twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2p_dmc.agent.run_files import load_run
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.observe.audit import Audit, audit, read_journal
from p2p_dmc.observe.journal import read_lines

RUN = "train"


def check_digests(homes: Sequence[Path], run: str = RUN) -> None:
    """AssertionError, in words, unless every round and view that two homes share is the same on both."""
    found = audit(homes, run)
    faults = [
        *found.unequal,
        *unequal_assignments(homes, run),
        *renumbered(homes, run),
        *restless(homes, run),
    ]
    assert not faults, "\n".join(faults)


def check_ledger(homes: Sequence[Path], run: str = RUN, *, skipped: int = 0) -> Audit:
    """AssertionError, in words, unless every sample of every finished epoch counts exactly once.

    ``skipped``: how many samples the run may have given up at most; its rounds have them on record.
    """
    found = audit(homes, run)
    gone = sum(hi - lo for line in found.rounds for _, _, lo, hi in line.get("skipped", ()))
    faults = [*found.inexact, *wrong_ends(homes, found, gone, run)]
    if gone > skipped:
        faults.append(f"{gone} samples were given up, {skipped} may be")
    assert not faults, "\n".join(faults)
    return found


def check_finished(
    homes: Sequence[Path], others: Sequence[Path] = (), run: str = RUN, *, epochs: int, skipped: int = 0
) -> Audit:
    """`check_digests` and `check_ledger` of a run that ended, with the same final model on all of ``homes``.

    ``others``: homes that took part in the run, or may have, and did not see its end.
    """
    check_digests([*homes, *others], run)
    found = check_ledger([*homes, *others], run, skipped=skipped)
    assert found.finished_epochs == epochs, f"{found.finished_epochs} epochs are whole, not {epochs}"
    models = {h.name: h / "runs" / run / "final" / "model.safetensors" for h in homes}
    missing = [name for name, path in models.items() if not path.exists()]
    assert not missing, f"no final model in {', '.join(missing)}"
    assert len({path.read_bytes() for path in models.values()}) == 1, f"final models differ: {list(models)}"
    return found


def unequal_assignments(homes: Sequence[Path], run: str = RUN) -> Iterator[str]:
    """Where two homes have another assignment for the same view."""
    seen: dict[str, tuple[str, Any]] = {}
    for home in homes:
        view_id = ""
        for line in read_lines(home / "events.jsonl"):
            if line.get("run") == run and line["event"] == "view":
                view_id = line["view_id"]
            if line.get("run") == run and line["event"] == "assignment":
                said = (line["epoch"], line["skipped"], line["assignment"])
                first, one = seen.setdefault(view_id, (home.name, said))
                if one != said:
                    yield f"view {line['view_epoch']}: the assignment is {one} on {first}, {said} on {home.name}"


def renumbered(homes: Sequence[Path], run: str = RUN) -> Iterator[str]:
    """Rounds that one home completed twice, and homes whose lineage went backwards within a history."""
    for home in homes:
        lines = read_journal(home, run).rounds
        named = [(line["history"], line["view_epoch"], line["round"]) for line in lines]
        twice = [one for one, times in Counter(named).items() if times > 1]
        if twice:
            yield f"{home.name} completed twice: {twice}"
        for one, two in pairwise(named):
            if one[0] == two[0] and two < one:
                yield f"{home.name} completed {two} after {one}"


def restless(homes: Sequence[Path], run: str = RUN) -> Iterator[str]:
    """Homes that installed a view after their run had ended by agreement, before they started again."""
    for home in homes:
        outcome = ""
        for line in read_lines(home / "events.jsonl"):
            if line["event"] == "started":
                outcome = ""
            if line.get("run") == run and line["event"] == "run_over":
                outcome = line["outcome"]
            if line.get("run") == run and line["event"] == "view" and outcome in ("finished", "stopped"):
                yield f"{home.name} installed view {line['view_epoch']} after its run was {outcome}"


def wrong_ends(homes: Sequence[Path], found: Audit, skipped: int, run: str = RUN) -> Iterator[str]:
    """Where what run.json says of the end is not what the rounds add up to."""
    for home in homes:
        facts = load_run(home / "runs" / run)
        if "finished" not in facts:
            continue
        ledger = Ledger.from_bytes(bytes.fromhex(facts["ledger"]))
        if not ledger.done:
            yield f"{home.name} finished in epoch {ledger.epoch} of {ledger.epochs}"
        if tuple(facts["finished"]["lineage"]) != found.head:
            yield f"{home.name} finished at {facts['finished']['lineage']}, the others at {found.head}"
        if ledger.samples_total != found.samples_counted:
            yield f"{home.name} counted {ledger.samples_total}, the rounds {found.samples_counted}"
        due = ledger.epochs * sum(ledger.counts)
        if ledger.samples_total + skipped != due:
            yield f"{home.name} counted {ledger.samples_total} and gave up {skipped} of {due} samples"
