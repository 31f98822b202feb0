"""What seeding keeps in memory does not grow with the number of samples."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys
from pathlib import Path
from p2p_dmc.data import spill
from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.readers.base import Spool
from p2p_dmc.data.samples import SampleReader
from p2p_dmc.data.seeding import plan_data_sets
from p2p_dmc.data.store import Store

# so small that the smaller of the two numbers of samples does not fit either
spill.IN_MEMORY_BYTES, spill.RUN_BYTES, spill._MERGE_BYTES = 1 << 20, 2 << 20, 1 << 20
folder, count = Path(sys.argv[1]), int(sys.argv[2])
source = folder / "rows.jsonl"
with source.open("w") as file:
    for number in range(count):
        file.write('{"n": %d}\\n' % number)
store = Store(folder / "store")
with store.spool_folder() as spool_folder, Spool(spool_folder) as spool:
    found = scan(source, spool=spool)
    [plan] = plan_data_sets(found, name="rows", max_shard_size=16 << 20)
    manifest = plan.write(store, 1)
assert len(manifest) == count
del plan, found
manifest = Manifest.from_bytes(manifest.to_bytes())  # as the peers have it
with SampleReader(max_open=2) as reader:  # it keeps the indexes of the shards that it has open
    for shard in range(len(manifest.shards)):
        assert reader.read(store.path(manifest.digest, shard), manifest, shard, 0)["json"]
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_bytes(folder: Path, count: int) -> int:
    """The most that a process had resident which seeds so many rows and reads some of them."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(count)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) << 10


@pytest.mark.long
def test_ten_times_the_samples_in_the_same_memory(tmp_path: Path) -> None:
    """450 000 samples more; at 24 bytes for each, less than a key and an offset, it would fail."""
    few, many = peak_bytes(tmp_path / "few", 50_000), peak_bytes(tmp_path / "many", 500_000)
    assert many - few < 24 * 450_000, (few, many)
