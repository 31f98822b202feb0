"""CI's share of chaos: nine faults, four of them exact cuts, in a run that must end as if nothing had been."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.soak import chaos, faults
from tests.soak.chaos_run import ChaosRun, Outcome, Record
from tests.soak.faults import Fault, PhaseCut
from tests.soak.hosts import Hosts, missing_tools

CHAOS = Path(chaos.__file__)


def in_the_round(hosts: Hosts, rng: random.Random) -> Sequence[Fault]:
    a, b, c, _ = hosts.peers
    return [
        PhaseCut(hosts, a, rng, "reducing", "kill"),
        faults.StopAgent(hosts, b, rng),
        faults.CutOut(hosts, c, rng),
    ]


def between_rounds(hosts: Hosts, rng: random.Random) -> Sequence[Fault]:
    _, b, c, d = hosts.peers
    return [
        PhaseCut(hosts, d, rng, "proposing", "stop"),
        PhaseCut(hosts, b, rng, "complete", "kill"),
        faults.Cut(hosts, c, rng),
    ]


def on_the_disk(hosts: Hosts, rng: random.Random) -> Sequence[Fault]:
    a, _, c, d = hosts.peers
    return [
        PhaseCut(hosts, c, rng, "checkpointing", "kill"),
        faults.BadCheckpoint(hosts, d, rng),
        faults.StopTree(hosts, a, rng),
    ]


def test_nine_faults_leave_no_trace(tmp_path: Path) -> None:
    if lacking := missing_tools():
        refused = subprocess.run(
            [sys.executable, str(CHAOS), "--quick"], capture_output=True, text=True, check=False
        )
        assert refused.returncode == 2 and lacking in refused.stderr
        return
    run = ChaosRun(tmp_path / "peers", random.Random(0), "ci")
    outcome = run.play(9, plan=(in_the_round, between_rounds, on_the_disk), keep=tmp_path / "kept")
    story = "\n".join(map(str, [*outcome.found, *outcome.records]))
    assert not outcome.found, story
    assert len(outcome.records) == 9 and not outcome.unreached, story
    assert all(record.proof and record.noticed and record.recovered_s for record in outcome.records), story
    assert outcome.replayed == outcome.rounds > 0


def test_damage_is_always_done(tmp_path: Path) -> None:
    for size in (1, 8, 9, 5000):
        for seed in range(20):
            path = tmp_path / "file"
            path.write_bytes(bytes(size))
            told = faults.damage(path, random.Random(seed))
            assert path.read_bytes() != bytes(size) and path.name in told


def test_results_add_up(tmp_path: Path) -> None:
    one = chaos.summary([Outcome("1.0", records=[record("cut", "b: SUSPECT"), record("cut", "")])], 1)
    two = chaos.summary([Outcome("2.0", records=[record("kill all", "a: view")], found=["odd"])], 2)
    assert (one["faults"], one["kinds"], one["unnoticed"], one["ledger_exact"]) == (2, {"cut": 2}, 1, True)
    both = chaos.merged([one, two, chaos.summary([Outcome("3.0", hung=True)], 3)])
    assert (both["faults"], both["kinds"], both["runs"]) == (3, {"cut": 2, "kill all": 1}, 3)
    assert (both["hung"], both["ledger_exact"], both["seeds"]) == (1, False, [1, 2, 3])
    assert both["found"] == ["run 2.0: odd"] and len(both["records"]) == 3
    assert json.loads(chaos.pretty(both)) == both
    assert [chaos.code_of(result) for result in (one, two, both)] == [1, 1, 1]
    assert chaos.code_of(chaos.summary([Outcome("4.0", records=[record("cut", "seen")])], 4)) == 0


def record(kind: str, noticed: str) -> Record:
    return Record(run="r", kind=kind, victim="a", at_s=1.0, proof="done", noticed=noticed)
