"""The checks of `tests.system.checks` find what they are for: each fault is written into journals by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent.run_files import save_run
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.data.formats import scan
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards
from tests.system.checks import RUN, check_digests, check_finished, check_ledger
from tests.system.cluster import write_samples

Change = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]
EPOCHS, ROUNDS_PER_EPOCH = 2, 4


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    """Two homes of a run that went well: eight rounds in two views, two epochs over one shard of 16 samples."""
    store = Store(tmp_path / "a" / "store", 1 << 20)
    found = scan(write_samples(tmp_path / "data", 16))
    plan = plan_shards(found, mode="file", max_shard_size="auto")
    manifest = write_shards(plan, store, scan=found, name="tiny", mode="file", replicas=2, seed=0)
    ledger = Ledger.start(manifest.digest, manifest.sample_counts, 0, EPOCHS)
    events, rounds = [view(1, [0, 0]), assignment(1, 0), view(2, [1, 4]), assignment(2, 1)], []
    for number in range(1, 9):
        epoch, part = divmod(number - 1, ROUNDS_PER_EPOCH)
        rounds.append(round_line(1 + epoch, number, epoch, [[0, 4 * part, 4 * part + 4]]))
        ledger = ledger.advance([Stretch(shard=0, lo=4 * part, hi=4 * part + 4)])
    for name in ("a", "b"):
        home = tmp_path / name
        save_run(
            home / "runs" / RUN,
            fingerprint=[["data set", f"tiny {manifest.digest.hex()[:12]}"]],
            finished={"lineage": [2, 8]},
            ledger=ledger.to_bytes().hex(),
        )
        (home / "runs" / RUN / "final").mkdir()
        (home / "runs" / RUN / "final" / "model.safetensors").write_bytes(b"model")
        write(home, [*events, {"event": "run_over", "run": RUN, "time": 9.0, "outcome": "finished"}], rounds)
    return [tmp_path / "a", tmp_path / "b"]


def view(view_epoch: int, start: list[int]) -> dict[str, Any]:
    facts = {"view_id": f"{view_epoch:032}", "history": "aa", "members": ["a", "b"], "digest": "d0"}
    return {"event": "view", "run": RUN, "time": 0.5, "view_epoch": view_epoch, "start": start, **facts}


def assignment(view_epoch: int, epoch: int) -> dict[str, Any]:
    facts = {"epoch": epoch, "skipped": 0, "assignment": [[[[0, 0, 8]]], [[[0, 8, 16]]]]}
    return {"event": "assignment", "run": RUN, "time": 0.6, "view_epoch": view_epoch, **facts}


def round_line(view_epoch: int, number: int, epoch: int, counted: list[list[int]]) -> dict[str, Any]:
    line = {"run": RUN, "time": float(number), "view_epoch": view_epoch, "round": number, "epoch": epoch}
    same = {"tau": 4, "loss": 1.0, "samples_round": 4, "samples_total": 4 * number}
    return {
        **line,
        **same,
        "digest": f"d{number}",
        "state": f"s{number}",
        "counted": [[one] for one in counted],
    }


def write(home: Path, events: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    for name, lines in (("events.jsonl", events), ("metrics.jsonl", rounds)):
        (home / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def change(home: Path, what: Change) -> None:
    """Rewrite one home's journals."""
    lines = {n: [json.loads(t) for t in (home / n).read_text().splitlines()] for n in JOURNALS}
    what(*(lines[name] for name in JOURNALS))
    write(home, *(lines[name] for name in JOURNALS))


JOURNALS = ("events.jsonl", "metrics.jsonl")


def test_a_good_run_passes(homes: list[Path]) -> None:
    found = check_finished(homes, epochs=EPOCHS)
    assert (found.head, found.compared, found.samples_counted) == ((2, 8), 8, 32)


def other_digest(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    rounds[5]["digest"] = "other"


def other_assignment(events: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
    events[3]["assignment"].reverse()


def other_members(events: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
    events[2]["members"] = ["b", "a"]


def round_twice(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    rounds.append(rounds[-1])


def backwards(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    rounds.append(rounds.pop(3))


def view_after_the_end(events: list[dict[str, Any]], _: list[dict[str, Any]]) -> None:
    events.append(view(3, [2, 8]))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (view_after_the_end, "b installed view 3 after its run was finished"),
        (other_digest, "view 2 round 6: digest is d6 on a, other on b"),
        (other_assignment, "view 2: the assignment is"),
        (other_members, "view 2: members is"),
        (round_twice, "b completed twice: [('aa', 2, 8)]"),
        (backwards, "b completed ('aa', 1, 4) after ('aa', 2, 8)"),
    ],
)
def test_peers_that_differ_are_found(homes: list[Path], what: Change, words: str) -> None:
    change(homes[1], what)
    with pytest.raises(AssertionError, match="^" + words.translate({ord(c): f"\\{c}" for c in "()[]"})):
        check_digests(homes)


def counted_twice(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    rounds[1]["counted"] = rounds[0]["counted"]


def a_round_left_out(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    del rounds[2]


def last_round_lost(_: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> None:
    del rounds[-1]


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (counted_twice, "positions 0 to 3: counted 2 times"),
        (counted_twice, "positions 4 to 7: never counted"),
        (a_round_left_out, "view 1 round 3 is in history, but in no journal"),
        (last_round_lost, "finished at \\[2, 8\\], the others at \\(2, 7\\)"),
    ],
)
def test_a_ledger_that_is_not_exact_is_found(homes: list[Path], what: Change, words: str) -> None:
    for home in homes:
        change(home, what)
    with pytest.raises(AssertionError, match=words):
        check_ledger(homes)


def test_a_round_that_history_passed_by_does_not_count(homes: list[Path]) -> None:
    """View 2 starts from round 4, so a fifth round of view 1 on one peer is not in history."""
    change(homes[0], lambda _, rounds: rounds.insert(4, round_line(1, 5, 1, [[0, 0, 4]])))
    check_ledger(homes)


def test_a_view_that_only_some_installed_is_no_fault(homes: list[Path]) -> None:
    """Another view of the same number on one peer, in which nobody could complete a round."""
    change(homes[0], lambda events, _: events.insert(4, {**view(3, [2, 8]), "view_id": "x"}))
    change(homes[1], lambda events, _: events.insert(4, {**view(3, [2, 8]), "members": ["b"]}))
    check_finished(homes, epochs=EPOCHS)


def test_what_was_given_up_is_on_record_and_must_not_count(homes: list[Path]) -> None:
    for home in homes:
        change(home, lambda _, rounds: rounds[2].update(skipped=[[0, 0, 0, 4]]))
    with pytest.raises(AssertionError, match="both counted and skipped"):
        check_ledger(homes, skipped=4)
    with pytest.raises(AssertionError, match="4 samples were given up, 0 may be"):
        check_ledger(homes)


def test_other_final_models_are_found(homes: list[Path]) -> None:
    (homes[1] / "runs" / RUN / "final" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(AssertionError, match="final models differ"):
        check_finished(homes, epochs=EPOCHS)


def test_a_run_that_ended_early_is_found(homes: list[Path]) -> None:
    with pytest.raises(AssertionError, match="2 epochs are whole, not 3"):
        check_finished(homes, epochs=3)
