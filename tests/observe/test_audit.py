"""The audit on journals written by hand: a clean run with a crash passes, doctored ones do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent.run_files import KnownPart, fingerprint, save_run
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.data.disk import MANIFEST_NAME
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.errors import UserError
from p2p_dmc.observe.audit import Audit, PeerJournal, audit, judge, read_journal, trained_on
from p2p_dmc.wire.trainer_messages import RunReady
from tests.data.test_mixture import CODE, MIXED, WEB

COUNTS = (4, 2)
Lines = list[dict[str, Any]]
Journals = dict[str, tuple[Lines, Lines]]


def round_line(
    view: int, number: int, epoch: int, total: int, *counted: tuple[int, int, int]
) -> dict[str, Any]:
    return {
        "time": float(100 * view + number),
        "run": "r",
        "view_epoch": view,
        "round": number,
        "digest": f"{view:02x}{number:02x}",
        "state": f"s{view}{number}",
        "tau": 2,
        "loss": 1.5,
        "epoch": epoch,
        "samples_round": sum(hi - lo for _, lo, hi in counted),
        "samples_total": total,
        "counted": [[list(c)] for c in counted],
    }


def view_line(view: int, start: tuple[int, int], *members: str, history: str = "aa") -> dict[str, Any]:
    return {
        "time": 100.0 * view,
        "event": "view",
        "run": "r",
        "view_epoch": view,
        "view_id": f"id{view}{history}",
        "history": history,
        "members": list(members),
        "start": list(start),
        "digest": f"start{view}",
    }


def over_line() -> dict[str, Any]:
    return {"time": 999.0, "event": "run_over", "run": "r", "outcome": "finished", "detail": ""}


def crash() -> Journals:
    """Two epochs of six samples. Peer c dies in view 1; its round 3 is lost, and view 2 starts from 2."""
    early = [round_line(1, 1, 0, 2, (0, 0, 1), (1, 0, 1)), round_line(1, 2, 0, 4, (0, 1, 3))]
    lost = round_line(1, 3, 0, 6, (0, 3, 4), (1, 1, 2))
    late = [
        round_line(2, 3, 0, 6, (1, 1, 2), (0, 3, 4)),
        round_line(2, 4, 1, 10, (0, 0, 4)),
        round_line(2, 5, 1, 12, (1, 0, 2)),
    ]
    first, second = view_line(1, (0, 0), "a", "b", "c"), view_line(2, (1, 2), "a", "b")
    return {
        "a": ([*early, *late], [first, second, over_line()]),
        "b": (copy.deepcopy([*early, *late]), [first, second, over_line()]),
        "c": (copy.deepcopy([*early, lost]), [first]),
    }


def judged(journals: Journals, tmp_path: Path) -> Audit:
    """Through the files, as programs use it."""
    read = []
    for peer, (rounds, events) in journals.items():
        home = tmp_path / peer
        home.mkdir()
        for name, lines in (("metrics.jsonl", rounds), ("events.jsonl", events)):
            (home / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut sho')
        read.append(read_journal(home, "r"))
    return judge(read, COUNTS)


def test_a_run_with_a_crash_is_exact(tmp_path: Path) -> None:
    found = judged(crash(), tmp_path)
    assert (found.unequal, found.inexact, found.ok) == ((), (), True)
    assert [(line["view_epoch"], line["round"]) for line in found.rounds] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (2, 4),
        (2, 5),
    ]
    assert (found.head, found.compared, found.history) == ((2, 5), 5, "aa")
    assert (found.finished_epochs, found.samples_due, found.samples_counted) == (2, 12, 12)


def test_an_epoch_that_is_not_over_needs_no_more_than_not_to_repeat(tmp_path: Path) -> None:
    journals = crash()
    for rounds, events in journals.values():
        del rounds[4:]
        events[:] = [e for e in events if e["event"] != "run_over"]
    found = judged(journals, tmp_path)
    assert (found.ok, found.finished_epochs, found.samples_counted) == (True, 1, 6)


def test_another_history_is_judged_for_itself(tmp_path: Path) -> None:
    """A peer that founded alone, and yielded: its rounds have the same numbers, and do not count."""
    journals = crash()
    alone = round_line(1, 1, 0, 1, (0, 2, 3)) | {"digest": "other", "state": "other", "time": 50.0}
    founded = view_line(1, (0, 0), "d", history="bb") | {"time": 40.0}
    rounds, events = copy.deepcopy(journals["a"])
    journals["d"] = ([alone, *rounds], [founded, *events])
    assert judged(journals, tmp_path).ok


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("later", [False, True])
def test_a_history_goes_on_where_it_took_anothers_place(tmp_path: Path, extra: int, later: bool) -> None:
    """After an eviction. What the evicted one did in the old history, in a view of the same number, is not in it."""
    journals = crash()
    second = view_line(2, (1, 2), "a", "b", history="bb") | {"parent": "aa"}
    for rounds, events in journals.values():
        events[:] = [events[0], *([second, *events[2:]] if len(events) > 1 else [])]
        if later and len(events) > 1:  # no round was completed in the first view of the new history
            events.insert(2, view_line(3, (1, 2), "a", "b", history="bb") | {"parent": ""})
            for line in rounds:
                if line["view_epoch"] == 2:
                    line |= {"view_epoch": 3, "time": line["time"] + 100}
    alone = [
        round_line(2, 3 + i, 0, 5 + i, (0, 3 + i, 4 + i)) | {"digest": f"alone{i}"} for i in range(extra)
    ]
    journals["d"] = (alone, [view_line(2, (1, 2), "d")])
    found = judged(journals, tmp_path)
    assert (found.ok, found.history, found.finished_epochs) == (True, "bb", 2), (found.unequal, found.inexact)
    journals["a"][0].pop(0), journals["b"][0].pop(0), journals["c"][0].pop(0)
    (tmp_path / "again").mkdir()
    again = judged(journals, tmp_path / "again")
    assert "view 1 round 1 is in history, but in no journal" in again.inexact


def test_other_runs_do_not_count(tmp_path: Path) -> None:
    journals = crash()
    journals["a"][0].insert(0, round_line(1, 1, 0, 2, (0, 0, 2)) | {"run": "other"})
    journals["a"][1].insert(0, view_line(7, (6, 6), "a") | {"run": "other"})
    assert judged(journals, tmp_path).ok


def change(peer: str, index: int, **fields: Any) -> Callable[[Journals], None]:
    def doctor(journals: Journals) -> None:
        journals[peer][0][index] |= fields

    return doctor


def change_all(index: int, **fields: Any) -> Callable[[Journals], None]:
    def doctor(journals: Journals) -> None:
        for peer in ("a", "b"):
            journals[peer][0][index] |= fields

    return doctor


def cut(index: int) -> Callable[[Journals], None]:
    def doctor(journals: Journals) -> None:
        for peer in ("a", "b"):
            del journals[peer][0][index]

    return doctor


def change_view(peer: str, **fields: Any) -> Callable[[Journals], None]:
    def doctor(journals: Journals) -> None:
        journals[peer][1][1] = journals[peer][1][1] | fields

    return doctor


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (change("b", 3, digest="dd"), "view 2 round 4: digest is 0204 on a, dd on b"),
        (change("c", 0, digest="dd"), "view 1 round 1: digest is 0101 on a, dd on c"),
        (change("a", 1, state="x"), "view 1 round 2: state is x on a, s12 on b"),
        (change("b", 4, tau=3), "view 2 round 5: tau is 2 on a, 3 on b"),
        (change("b", 4, counted=[[[1, 0, 1]]]), "view 2 round 5: counted is"),
        (change_view("b", members=["a"]), "view 2: members is ['a', 'b'] on a, ['a'] on b"),
    ],
)
def test_a_difference_between_peers_is_found(
    doctor: Callable[[Journals], None], said: str, tmp_path: Path
) -> None:
    journals = crash()
    doctor(journals)
    found = judged(journals, tmp_path)
    assert any(line.startswith(said) for line in found.unequal), found.unequal
    assert not found.ok


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (change_all(4, counted=[[[1, 0, 1]]]), "epoch 1, shard 1, positions 1 to 1: never counted"),
        (
            change_all(2, counted=[[[0, 2, 4]], [[1, 1, 2]]]),
            "epoch 0, shard 0, positions 2 to 2: counted 2 times",
        ),
        (change_all(3, counted=[[[0, 0, 5]]]), "epoch 1, shard 0, positions 4 to 4: does not exist"),
        (cut(3), "view 2 round 4 is in history, but in no journal"),
        (
            change_all(4, samples_total=11),
            "view 2 round 5: samples_total is 11, but the rounds up to it counted 12",
        ),
    ],
)
def test_a_ledger_that_is_not_exact_is_found(
    doctor: Callable[[Journals], None], said: str, tmp_path: Path
) -> None:
    journals = crash()
    doctor(journals)
    found = judged(journals, tmp_path)
    assert said in found.inexact
    assert (found.unequal, found.ok) == ((), False)


def test_a_view_that_starts_before_what_was_counted_twice(tmp_path: Path) -> None:
    """If view 2 had started from c's round 3, its own round 3 would have counted the same samples again."""
    journals = crash()
    for peer in ("a", "b"):
        journals[peer][1][1] = journals[peer][1][1] | {"start": [1, 3]}
        for line in journals[peer][0][2:]:
            line["round"] += 1
    assert "epoch 0, shard 0, positions 3 to 3: counted 2 times" in judged(journals, tmp_path).inexact


def test_no_round_at_all_is_no_success() -> None:
    nobody = PeerJournal(peer="a", rounds=(), events=())
    assert judge([nobody], COUNTS).inexact == ("no peer completed a round",)


def test_homes_without_the_run_are_a_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run 'r': none of the homes"):
        audit([tmp_path], "r")


def test_the_parts_of_a_mixture_may_lie_in_several_homes(tmp_path: Path) -> None:
    ready = RunReady(
        dataset=MIXED.digest, seed=1, epochs=2, batch_size=4, parameters=(), outer="average",
        tau_policy=TauPolicy(kind="fixed", tau0=1).to_bytes(),
    )  # fmt: skip
    homes = [tmp_path / name for name in "abc"]
    pairs = fingerprint(ready, MIXED.name, "majority", "auto", "wait", KnownPart.all_of(MIXED))
    save_run(homes[1] / "runs" / "r", fingerprint=pairs)
    for home, manifest in ((homes[0], WEB), (homes[2], CODE)):
        with pytest.raises(UserError, match="holds its data set's manifest"):
            trained_on(homes, "r")
        folder = home / "store" / manifest.digest.hex()
        folder.mkdir(parents=True)
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
    assert trained_on(homes, "r") == (dict(pairs), MIXED)
    alone = fingerprint(replace(ready, dataset=WEB.digest), "web", "majority", "auto", "wait")
    save_run(homes[1] / "runs" / "r", fingerprint=alone)
    assert trained_on(homes, "r") == (dict(alone), Mixture.of(WEB))
