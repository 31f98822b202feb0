"""What benchmarks/recovery.py makes of the lines that peers write, and what tests/soak/views.py of what they hold."""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
NAMES = ["p0", "p1", "p2"]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def load(name: str) -> Any:
    return importlib.import_module(name)


def steps_of(*said: tuple[float, int, str]) -> list[Any]:
    """(time, world, group) of steps that are numbered from 1."""
    step = load("recovery_kit.steps").Step
    return [
        step(time=at, number=i + 1, world=world, group=group, digest=f"d{i}")
        for i, (at, world, group) in enumerate(said)
    ]


# --- from lines to figures -------------------------------------------------------------------------------


def test_the_disturbed_round_reaches_from_the_old_group_to_the_next() -> None:
    kit = load("recovery_kit.steps")
    quick = steps_of((1.0, 3, "a"), (2.0, 3, "a"), (3.5, 2, "b"), (4.2, 2, "b"))
    slow = steps_of((1.0, 3, "a"), (2.1, 3, "a"), (3.9, 2, "b"))
    found = kit.trial({"p1": quick, "p2": slow}, 2.5, frozenset({2}))
    assert found.disturbed_s == pytest.approx(1.8)
    assert found.after_s == pytest.approx(1.4)


def test_a_round_that_the_old_group_still_completes_is_not_the_next() -> None:
    """The victim may have done its part: the others complete that round, and only the one after it is disturbed."""
    kit = load("recovery_kit.steps")
    lines = steps_of((1.0, 3, "a"), (2.0, 3, "a"), (3.0, 3, "a"), (4.4, 2, "b"))
    found = kit.trial({"p1": lines}, 2.9, frozenset({2}))
    assert (found.disturbed_s, found.after_s) == (pytest.approx(1.4), pytest.approx(1.5))


def test_groups_of_another_size_are_passed_over() -> None:
    kit = load("recovery_kit.steps")
    lines = steps_of((1.0, 4, "a"), (2.0, 2, "b"), (5.0, 3, "c"))
    assert kit.trial({"p1": lines}, 1.5, frozenset({3})).disturbed_s == pytest.approx(4.0)
    assert kit.trial({"p1": lines}, 1.5, frozenset({1})) is None


def test_nobody_has_gone_on_until_everybody_has() -> None:
    kit = load("recovery_kit.steps")
    gone_on, not_yet = steps_of((1.0, 3, "a"), (3.0, 2, "b")), steps_of((1.0, 3, "a"))
    assert kit.trial({"p1": gone_on, "p2": not_yet}, 2.0, frozenset({2})) is None


def test_undisturbed_rounds_are_of_one_group_of_all() -> None:
    kit = load("recovery_kit.steps")
    lines = steps_of((1.0, 3, "a"), (2.0, 3, "a"), (4.0, 2, "b"), (5.0, 2, "b"), (9.0, 3, "c"), (9.5, 3, "c"))
    assert kit.undisturbed_s(lines, 3) == [pytest.approx(1.0), pytest.approx(0.5)]


def test_a_step_that_is_missing_makes_no_round() -> None:
    kit = load("recovery_kit.steps")
    lines = steps_of((1.0, 3, "a"), (2.0, 3, "a"), (3.0, 3, "a"))
    assert kit.undisturbed_s([lines[0], lines[2]], 3) == []


def test_figures_take_the_median_round_off() -> None:
    cell = {"disturbed_s": [1.5, 1.2, 3.0], "rounds_s": [1.0, 0.9, 5.0]}
    assert load("recovery_kit.steps").figures(cell) == {
        "trials": 3,
        "median_s": 0.5,
        "max_s": 2.0,
        "round_s": 1.0,
    }


# --- trials ----------------------------------------------------------------------------------------------


class Pretended:
    """Three peers whose lines are a function of time: 20 ms a round, and ``pause_s`` after a fault."""

    names = NAMES
    patience_s = 3.0

    def __init__(self, pause_s: float = 0.1, deaf: str = "") -> None:
        self.pause_s, self.deaf = pause_s, deaf
        self.log: list[tuple[str, str]] = []
        self._groups: list[tuple[float, frozenset[str]]] = [(time.time(), frozenset(NAMES))]

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    def steps(self, name: str) -> Sequence[Any]:
        step = load("recovery_kit.steps").Step
        ends = [begins for begins, _ in self._groups[1:]] + [time.time()]
        found = []
        for number, ((begins, members), end) in enumerate(zip(self._groups, ends, strict=True)):
            if name in members and not (number and name == self.deaf):
                found += [
                    step(
                        time=begins + 0.02 * k,
                        number=1000 * number + k,
                        world=len(members),
                        group=str(number),
                        digest="",
                    )
                    for k in range(1, 1 + int(max(0.0, end - begins) / 0.02))
                ]
        return found

    def worlds(self, kind: str) -> frozenset[int]:
        return frozenset({2})

    def fault(self, kind: str, name: str) -> float:
        self.log.append((kind, name))
        when = time.time()
        self._groups += [(when, frozenset()), (when + self.pause_s, frozenset(NAMES) - {name})]
        return when

    def noticed(self, name: str, when: float) -> float | None:
        return 0.01

    def bring_back(self, kind: str, name: str) -> None:
        self.log.append(("back", name))
        self._groups.append((time.time(), frozenset(NAMES)))

    def said(self) -> str:
        return "nothing"

    def violations(self) -> list[str]:
        return []


def trials(peers: Pretended, count: int, until: float = float("inf")) -> Iterator[Any]:
    found: Iterator[Any] = load("recovery_kit.contestant").run_trials(
        peers, "tree", count, random.Random(1), until, 0.1
    )
    return found


def test_trials_hurt_one_peer_after_the_other_and_bring_it_back() -> None:
    peers = Pretended()
    found = list(trials(peers, 3))
    assert [what for what, _ in peers.log] == ["tree", "back"] * 3
    assert all(peers.log[i][1] == peers.log[i + 1][1] for i in (0, 2, 4))
    for trial in found:
        assert trial.after_s >= 0.1
        assert trial.disturbed_s >= trial.after_s
        assert trial.rounds_s == (pytest.approx(0.02, abs=1e-4),) * 3
        assert trial.noticed_s == 0.01


def test_no_trial_begins_when_time_is_up() -> None:
    peers = Pretended()
    assert list(trials(peers, 3, until=time.monotonic() - 1)) == []
    assert peers.log == []


def test_a_survivor_that_does_not_go_on_is_a_hang() -> None:
    peers = Pretended(deaf="p1")
    peers.patience_s = 1.0
    with pytest.raises(load("recovery_kit.contestant").HungError, match="the others go on after tree"):
        for _ in trials(peers, 9):
            pass


# --- the program -----------------------------------------------------------------------------------------


def measurement(*words: str) -> Any:
    recovery = load("recovery")
    return recovery.Measurement(recovery.parse([*words]), {})


def test_options_that_make_no_sense_are_refused() -> None:
    recovery = load("recovery")
    for wrong in (["--peers", "2"], ["--trials", "-1"]):
        with pytest.raises(load("bench").BenchError, match="--peers"):
            recovery.parse(wrong)
    quick = recovery.parse(["--quick"])
    assert quick.width < recovery.parse([]).width and quick.peers == [4]


def test_what_is_measured_is_kept_and_the_rest_is_missing(tmp_path: Path) -> None:
    recovery = load("recovery")
    out = tmp_path / "x.json"
    first = measurement("--trials", "3", "--out", str(out))
    first.options.width, first.until = 1024, float("inf")
    recovery.CALM_S = 0.1
    first.options.trials = 2
    first.measure("ours", 3, Pretended(), ["tree"])
    kept = json.loads(out.read_text())
    assert len(kept["ours"]["3"]["tree"]["after_s"]) == 2
    again = recovery.Measurement(recovery.parse(["--trials", "3"]), kept)
    assert again.missing("ours", 3, "tree") == 1
    assert again.missing("ours", 3, "leave") == 3
    assert "tree" in recovery.report(kept)


def test_a_hang_of_ours_is_a_violation_one_of_a_neighbour_is_written_down() -> None:
    load("recovery").CALM_S = 0.1
    for name, violations in (("ours", 1), ("torchft", 0)):
        found = measurement("--trials", "9")
        peers = Pretended(deaf="p1")
        peers.patience_s = 1.0
        found.measure(name, 3, peers, ["tree"])
        assert found.cell(name, 3, "tree")["hung"] == 1
        assert len(found.violations) == violations


def test_a_neighbour_that_is_not_installed_is_skipped_with_its_reason(tmp_path: Path) -> None:
    found = measurement("--quick", "--envs", str(tmp_path))
    assert load("recovery").maker(found, "torchft", 4) is None
    assert re.search("not installed in .*: run without --quick", found.result["torchft"]["skipped"])


def test_an_environment_that_cannot_import_is_skipped_with_its_reason(tmp_path: Path) -> None:
    envs = load("recovery_kit.envs")
    python = tmp_path / "hivemind" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'ImportError: no libfoo' >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(envs.UnavailableError, match="import hivemind: ImportError: no libfoo"):
        envs.python_of(tmp_path, "hivemind", install=True)


def test_foreign_peers_are_processes_that_can_be_hurt_and_brought_back(tmp_path: Path) -> None:
    foreign = load("recovery_kit.foreign")
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, os, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "for i in range(1000):\n"
        "    line = {'time': time.time(), 'number': i, 'world': 3, 'group': 'g', 'digest': ''}\n"
        "    open(os.environ['RECOVERY_STEPS'], 'a').write(json.dumps(line) + '\\n')\n"
        "    time.sleep(0.02)\n"
    )

    class Pretending(foreign.Foreign):  # type: ignore[misc]
        name = "pretending"

        def command(self, name: str) -> list[Any]:
            return [self._python, script]

    with Pretending(Path(sys.executable), 3, 8, 0.0, 0) as peers:
        peers.start()
        wait_for(lambda: all(len(peers.steps(name)) > 3 for name in peers.names))
        peers.fault("silence", "p0")
        time.sleep(0.1)
        seen = len(peers.steps("p0"))
        time.sleep(0.2)
        assert len(peers.steps("p0")) == seen
        peers.bring_back("silence", "p0")
        wait_for(lambda: len(peers.steps("p0")) > seen)
        assert alive(peers, "p1") == 2
        peers.fault("tree", "p1")
        wait_for(lambda: not alive(peers, "p1"))
        peers.bring_back("tree", "p1")
        seen = len(peers.steps("p1"))
        wait_for(lambda: len(peers.steps("p1")) > seen)
    wait_for(lambda: not any(alive(peers, name) for name in peers.names))


def alive(peers: Any, name: str) -> int:
    """How many processes of a peer there are, whoever their parent is."""
    return len(peers.processes(name))


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "not so after 10 s"
        time.sleep(0.02)


# --- what a thousand views hold --------------------------------------------------------------------------


def series(grow: dict[str, float]) -> list[dict[str, Any]]:
    """A hundred looks at one process; ``grow``: of what, how much with each change."""
    usual = {
        "threads": 6,
        "descriptors": 40,
        "listening": 2,
        "connected": 9,
        "children": 0,
        "memory_mib": 90.0,
    }
    rng = random.Random(0)
    return [
        {
            "changes": 10 * i,
            "a agent": {k: v + 10 * i * grow.get(k, 0.0) + rng.randrange(3) for k, v in usual.items()},
        }
        for i in range(100)
    ]


def test_flat_series_are_no_growth() -> None:
    views = load_views()
    assert views.grown(views.slopes(series({}))) == []


@pytest.mark.parametrize(
    ("quantity", "each"), [("threads", 0.01), ("descriptors", 0.01), ("connected", 1.0), ("memory_mib", 0.03)]
)
def test_what_every_hundredth_change_leaves_behind_is_seen(quantity: str, each: float) -> None:
    views = load_views()
    assert [
        line.split(": ")[1].split()[0] for line in views.grown(views.slopes(series({quantity: each})))
    ] == [quantity]


def test_what_is_made_once_at_first_is_no_growth() -> None:
    views = load_views()
    found = series({})
    for sample in found[:15]:
        sample["a agent"]["descriptors"] = 5
    assert views.grown(views.slopes(found)) == []


def test_a_line_and_its_error() -> None:
    """Against the textbook's formula on five points."""
    views = load_views()
    assert views.line([1, 2, 3], [2, 4, 6]) == (2000.0, 0.0)
    slope, error = views.line([0, 1, 2, 3, 4], [0, 1, 0, 1, 0])
    assert (slope, error) == (0.0, pytest.approx(200.0, abs=0.1))


def test_too_few_looks_are_no_proof() -> None:
    views = load_views()
    assert views.grown(views.slopes(series({})[:2])) == ["too few samples for a line"]


def test_the_plot_is_an_image_with_a_line_for_each_process() -> None:
    views = load_views()
    shown = views.plot(views.columns(series({})))
    tree = ElementTree.fromstring(shown)
    lines = [part for part in tree.iter() if part.tag.endswith("polyline")]
    assert len(lines) == 5 and all(len(line.get("points", "").split()) == 100 for line in lines)
    assert len(shown) < 100_000


def load_views() -> Any:
    return importlib.import_module("tests.soak.views")
