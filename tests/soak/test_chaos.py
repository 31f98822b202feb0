"""CI's share of chaos: nine faults, four of them exact cuts, in a run that must end as if nothing had been."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.soak import chaos, faults
from tests.soak.chaos_run import ChaosRun
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
        PhaseCut(hosts, b, rng, "complete", "kill"),
        PhaseCut(hosts, d, rng, "proposing", "stop"),
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
