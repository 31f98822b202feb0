"""A cluster per test, which nothing outlives; on a failure pytest shows its peers' last words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import Cluster, write_samples

SAMPLES = 320


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of tiny files in four classes."""
    return write_samples(tmp_path / "tiny", SAMPLES)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """No peers yet."""
    with Cluster(tmp_path / "cluster") as peers:
        yield peers
        print(peers.report())
        left = peers.orphans()
        assert not left, f"outlived their agents: {left}"
