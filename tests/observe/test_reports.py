"""Tables for people: complete in a pipe, folded in a narrow terminal, never obeying what a peer calls itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from p2p_dmc.observe import reports

ALICE, BOB = "a" * 32, "b" * 32
CAROL = "c" * 32
NASTY = "[red]\x1b[2J"


def status_facts() -> dict[str, Any]:
    def member(peer_id: str, name: str) -> dict[str, Any]:
        where = {"address": f"tcp://{name}.example:7400", "state": "ALIVE", "role": "train"}
        return {"peer_id": peer_id, "name": name, **where}

    run = {
        "run": "train", "outcome": "", "view_epoch": 3, "members": [BOB, ALICE], "lineage": [3, 41],
        "learners": [CAROL],
        "committed": [3, 40], "round": 41, "tau": 8, "loss": 0.123456, "epoch": 1, "epochs": 5, "samples_total": 2400,
        "waiting": "bob is slow", "epoch_progress": {"counted": 600, "skipped": 3, "total": 1800}, "dataset": "d" * 32,
    }  # fmt: skip
    young = dict.fromkeys(run) | {
        "run": "young",
        "members": [],
        "learners": [],
        "samples_total": 0,
        "outcome": "",
        "waiting": "",
    }
    dataset = {
        "name": "digits", "dataset": "d" * 32, "samples": 1800, "size_bytes": 1 << 20, "shards": 29, "replicas": 2,
        "under_replicated": 4, "lost": 1, "holders": {ALICE: 29, BOB: 20},
        "progress": [{"run": "train", "epoch": 1, "epochs": 5, "counted": 600, "skipped": 3, "total": 1800}],
    }  # fmt: skip
    return {
        "members": [member(ALICE, "alice"), member(BOB, "bob")],
        "runs": [run, young, {"run": "elsewhere", "view_epoch": 7, "ask": "tcp://carol:1"}],
        "datasets": [dataset],
    }


def placement_facts() -> dict[str, Any]:
    shard = {"shard": "e" * 32, "size_bytes": 2048, "samples": 7, "should": [ALICE], "does": [BOB]}
    lost = {"shard": "f" * 32, "size_bytes": 2048, "samples": 7, "should": [ALICE, BOB], "does": []}
    move = {"shard": "e" * 32, "to": BOB, "size_bytes": 2048}
    one = {"name": "digits", "dataset": "d" * 32, "replicas": 2, "shards": [shard, lost], "moves": [move]}
    one |= {"size_bytes": 4096, "under_replicated": 2, "in_flight": 3, "unverified": 4, "lost": 1}
    one["dissenters"] = [BOB]
    one["peers"] = [
        {"peer_id": p, "held": i, "held_bytes": i << 10, "unverified": i, "placed": 2, "placed_bytes": 4096,
         "to_come": 2 - i, "to_come_bytes": (2 - i) << 10, "full": p == BOB}
        for i, p in enumerate((ALICE, BOB))
    ]  # fmt: skip
    names, domains = {ALICE: "alice", BOB: "bob"}, {BOB: "rack2", ALICE: "rack1"}
    return {"datasets": [one], "without": [ALICE], "names": names, "domains": domains}


def rendered(render: Any, facts: dict[str, Any], columns: int) -> str:
    terminal = Terminal(width=columns, highlight=False, markup=False)
    with terminal.capture() as captured:
        render(facts, terminal)
    return captured.get()


def columns_of(text: str, start: str) -> list[str]:
    """The cells of the line that begins so."""
    [line] = [one for one in text.splitlines() if one.startswith(start)]
    return [cell for cell in line.split("  ") if cell.strip()]


def test_status_says_everything() -> None:
    text = rendered(reports.render_status, status_facts(), 10_000)
    cells = [cell.strip() for cell in columns_of(text, "train ")]
    assert cells == [
        "train",
        "3",
        "41",
        "8",
        "0.1235",
        "2 of 5",
        "34%, 3 skipped",
        "2400",
        "3.40",
        "bob, alice, cccccccc (catching up)",
    ]
    assert [cell.strip() for cell in columns_of(text, "elsewhere")][-1] == "ask tcp://carol:1"
    assert "run train waits: bob is slow\n" in text
    assert "data set digits dddddddddddd: 1800 samples in 29 shards, 1.0 MiB; 2 replicas wanted, " in text
    assert "under-replicated 4, lost 1\n" in text
    assert "run train: epoch 2 of 5, 600 of 1800 samples counted, 3 skipped\n" in text


def test_a_finished_epoch_count() -> None:
    facts = status_facts()
    for where in (facts["runs"][0], facts["datasets"][0]["progress"][0]):
        where["epoch"] = 5
    facts["runs"][0] |= {"outcome": "finished", "waiting": ""}
    text = rendered(reports.render_status, facts, 10_000)
    assert " 5 of 5 " in text and " 100% " in text
    assert "run train: all of 5 epochs done\n" in text
    assert "run train is over on the peer asked: finished\n" in text


STOPPING: dict[str, tuple[dict[str, Any], str]] = {
    "asked to": (
        {"stopping": True, "stop_waits_for": [BOB, CAROL]},
        "run train stops at the end of its round; waiting for bob, cccccccc\n",
    ),
    "its last round is over": ({"stopping": True}, "run train stops at the end of its round\n"),
    "others are not heard yet": (
        {"stopping": True, "outcome": "stopped", "stop_waits_for": [BOB], "stop_not_heard": [BOB]},
        "run train is stopped on the peer asked; waiting for word that bob stopped, too\n",
    ),
    "others were not heard": (
        {"outcome": "stopped", "stop_waits_for": [], "stop_not_heard": [BOB]},
        "run train is over on the peer asked: stopped, and no word came that bob stopped at the same round\n",
    ),
    "all were heard": (
        {"outcome": "stopped", "stop_waits_for": [], "stop_not_heard": []},
        "run train is over on the peer asked: stopped\n",
    ),
}


@pytest.mark.parametrize("how_far", STOPPING)
def test_status_says_for_whom_a_stop_waits(how_far: str) -> None:
    more, line = STOPPING[how_far]
    facts = status_facts()
    facts["runs"][0] |= {"waiting": ""} | more
    assert line in rendered(reports.render_status, facts, 10_000)


def stop_told(
    monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any] | None], *, as_json: bool = False
) -> None:
    """`dmc-peer stop` with these answers to its looks, None: the agent has ended; the last one stays."""
    facts = status_facts()
    monkeypatch.setattr(reports.Asked, "at", lambda seed, home: reports.Asked())
    monkeypatch.setattr(reports.Asked, "follow", lambda self, *_, **__: (self, {"run": "train"}))
    monkeypatch.setattr(reports, "PATIENCE_S", 0.0)
    monkeypatch.setattr(reports, "LOOK_EVERY_S", 0.001)

    def look(self: object, command: str, **_: object) -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise reports.NoAnswerError("nobody")
        return facts | {"runs": [facts["runs"][0] | {"waiting": ""} | answer]}

    monkeypatch.setattr(reports.Asked, "ask", look)
    reports.stop(None, Path("home"), "", as_json)


def test_stop_waits_until_all_were_heard_and_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = {"stopping": True, "outcome": "stopped", "stop_waits_for": [BOB], "stop_not_heard": [BOB]}
    heard = waits | {"stop_waits_for": [], "stop_not_heard": []}
    stop_told(monkeypatch, [{"stopping": True, "stop_waits_for": [BOB]}, waits, heard])
    out, err = capsys.readouterr()
    assert "run 'train' stops at the end of its round; waiting for bob; 0 s so far\n" in err
    assert out == (
        "run 'train' is stopped at view 3 round 41, after 2400 samples; the same join command goes on from there\n"
    )


@pytest.mark.parametrize("ended", [True, False])
def test_stop_says_who_was_not_heard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    unheard = {"outcome": "stopped", "stop_waits_for": [], "stop_not_heard": [BOB]}
    answers = [unheard | {"stop_waits_for": [BOB]}, None] if ended else [unheard]
    stop_told(monkeypatch, [*answers])
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        "no word came that bob stopped at the same round: all peers of the last view are needed to go on"
    ]
    stop_told(monkeypatch, [*answers], as_json=True)
    assert json.loads(capsys.readouterr().out)["stop_not_heard"] == [BOB]


def test_placement_says_everything() -> None:
    text = rendered(reports.render_placement, placement_facts(), 10_000)
    assert "2 shards, 4.0 KiB, 2 replicas wanted; 2 not yet where they should be\n" in text
    assert "\nunder-replicated 2, in flight 3, not verified yet 4, lost 1\n" in text
    [mine, other] = [[c.strip() for c in line.split("  ") if c.strip()] for line in text.splitlines()[4:6]]
    assert mine == ["alice", "0", "0 B", "2", "4.0 KiB", "2", "2.0 KiB", "-"]
    assert other == ["bob", "1", "1.0 KiB", "2", "4.0 KiB", "1", "1.0 KiB", "1 not verified yet, no room"]
    assert [c.strip() for c in columns_of(text, "eeeeeeeeeeee")][1:] == ["7", "2.0 KiB", "alice", "bob"]
    assert [c.strip() for c in columns_of(text, "ffffffffffff")][-1] == "nobody"
    assert "without alice:\n" in text
    [*_, move] = [line for line in text.splitlines() if line.startswith("bob ")]
    assert move.split() == ["bob", "1", "2.0", "KiB"]
    assert "\nplaced otherwise by bob\n" in text
    assert "\ndomain rack1: alice\ndomain rack2: bob\n" in text


def test_of_a_large_data_set_only_what_is_not_in_place_is_listed() -> None:
    facts = placement_facts()
    [one] = facts["datasets"]
    placed = one["shards"][0] | {"should": [ALICE], "does": [ALICE, BOB]}
    one["shards"] = [placed | {"shard": f"{i:032x}"} for i in range(100)] + one["shards"]
    text = rendered(reports.render_placement, facts, 10_000)
    assert "100 more shards: --json lists all\n" in text and "0" * 12 not in text
    assert columns_of(text, "eeeeeeeeeeee")
    one["shards"] = one["shards"][:100]
    text = rendered(reports.render_placement, facts, 10_000)
    assert "\n100 more shards: --json lists all\n" in text and "SHOULD HOLD  HOLD" not in text


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
@pytest.mark.parametrize(
    ("render", "facts"),
    [(reports.render_status, status_facts()), (reports.render_placement, placement_facts())],
)
def test_a_narrow_terminal_folds_and_loses_nothing(render: Any, facts: dict[str, Any], columns: int) -> None:
    text = rendered(render, facts, columns)
    assert all(len(line) <= columns for line in text.splitlines())
    if columns >= 80:
        assert "…" not in text


def test_names_are_shown_not_obeyed() -> None:
    facts = status_facts()
    facts["members"][0]["name"] = NASTY
    text = rendered(reports.render_status, facts, 10_000)
    assert "[red]\\x1b[2J" in text and "\x1b" not in text


def test_show_pads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    reports.show(reports.render_status, status_facts())
    out = capsys.readouterr().out
    assert out == "".join(line.rstrip() + "\n" for line in out.splitlines()) and len(out) < 2000


def test_a_mixtures_progress_is_shown_with_each_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = status_facts()
    run, dataset = facts["runs"][0], facts["datasets"][0]
    facts["runs"] = [
        run
        | {"dataset": "e" * 32, "dataset_name": "3 x code + 1 x web"}
        | {
            "parts": [
                {"dataset": d * 32, "name": name, "passes": n}
                for d, name, n in (("c", "code", 3), ("d", "web", 1))
            ]
        },
        run
        | {
            "run": "alone",
            "dataset": "c" * 32,
            "parts": [{"dataset": "c" * 32, "name": "code", "passes": 1}],
        },
        dict.fromkeys(run) | {"run": "young", "members": [], "learners": [], "parts": []},
    ]
    facts["datasets"] = [
        dataset | {"name": "web"},
        dataset | {"name": "code", "dataset": "c" * 32},
        dataset | {"dataset": "f" * 32},
    ]
    monkeypatch.setattr(reports.Asked, "ask", lambda self, command: facts)
    web, code, other = reports.gather(reports.Asked())["datasets"]
    assert [p["run"] for p in web["progress"]] == ["train"] and other["progress"] == []
    assert [p["run"] for p in code["progress"]] == ["train", "alone"]
    text = rendered(reports.render_status, facts, 400)
    assert (
        text.count("run train on 3 x code + 1 x web: epoch 2 of 5, 600 of 1800 samples counted, 3 skipped\n")
        == 2
    )
    assert text.count("run alone: epoch 2 of 5") == 1
