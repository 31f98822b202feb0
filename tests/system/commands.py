"""Commands that a person types at peers that run, and what they answer."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from tests.system.cluster import DMC_PEER, MARK, Cluster

DEADLINE_S = 60


def command(cluster: Cluster, *words: str, code: int = 0) -> str:
    """The standard output of a `dmc-peer` command that ends with this exit code."""
    done = subprocess.run(
        [str(DMC_PEER), *words],
        env={**os.environ, MARK: cluster.mark},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stderr}\n{cluster.report()}"
    assert "Traceback" not in done.stderr
    return done.stdout


def facts(cluster: Cluster, *words: str) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    lines = command(cluster, *words, "--json").splitlines()
    assert len(lines) == 1
    found: dict[str, Any] = json.loads(lines[0])
    return found


def complaint(cluster: Cluster, *words: str) -> str:
    """The one line of a command that fails."""
    done = subprocess.run(
        [str(DMC_PEER), *words],
        env={**os.environ, MARK: cluster.mark},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, ""), f"{words}: {done}\n{cluster.report()}"
    [line] = done.stderr.splitlines()
    return line
