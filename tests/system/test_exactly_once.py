"""Every epoch is the same samples, whoever trains on them; and who trained on what follows from the recorded views."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from p2p_dmc.agent.client import ask
from p2p_dmc.data.disk import MANIFEST_NAME, shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.samples import read_index
from p2p_dmc.errors import UserError
from p2p_dmc.observe.seen import seen
from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer, keys, write_samples
from tests.system.scenario import NAMES, train_together

SCRIPT = Path(__file__).parent / "scripts" / "sees.py"
EPOCHS, MANY_EPOCHS = 2, 20
ByPeer = dict[tuple[str, int], list[str]]
"""Keys in the order in which a peer trained on them, by peer_id and epoch."""


def join(
    cluster: Cluster,
    seed: Peer | str,
    names: Sequence[str],
    *,
    epochs: int = EPOCHS,
    slow: bool = False,
    together: int = 0,
) -> list[Peer]:
    """Peers that train with the script, at the same moment."""
    words = ["--record", str(cluster.root / "record"), "--epochs", str(epochs)]
    words += ["--slow", str(cluster.slow)] if slow else []
    options = ["--min-peers", str(together or len(names)), "--checkpoint-every", "1s"]
    return [cluster.join(name, seed, *words, options=options, script=SCRIPT) for name in names]


def written(cluster: Cluster) -> ByPeer:
    """What the scripts wrote down."""
    found: ByPeer = defaultdict(list)
    for path in sorted((cluster.root / "record").iterdir()):
        for line in map(json.loads, path.read_text().splitlines()):
            found[line["peer"], line["epoch"]] += line["keys"]
    return found


def recomputed(holder: Peer, peers: Sequence[Peer]) -> ByPeer:
    """What follows from the peers' journals. ``holder`` has all shards."""
    [path] = (holder.home / "store").glob(f"*/{MANIFEST_NAME}")
    manifest = Manifest.from_bytes(path.read_bytes())
    names = [tuple(read_index(shard_path(path.parent, s.digest)).keys()) for s in manifest.shards]
    found: ByPeer = defaultdict(list)
    for one in seen([p.home for p in peers], "sees"):
        found[one.peer_id, one.epoch] += [names[shard][index] for shard, index in one.samples]
    return found


def each_epoch(by_peer: ByPeer, epochs: int = EPOCHS) -> list[Counter[str]]:
    """The samples of all peers."""
    found: list[Counter[str]] = [Counter() for _ in range(epochs)]
    for (_, epoch), keys_of_it in by_peer.items():
        found[epoch].update(keys_of_it)
    return found


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_epoch_is_the_same_samples_however_many_peers_train(
    cluster: Cluster, data: Path, count: int
) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    peers = join(cluster, seed, NAMES[:count])
    cluster.ended(peers)
    check_finished([p.home for p in peers], run="sees", epochs=EPOCHS)
    told = written(cluster)
    assert each_epoch(told) == [Counter(keys(data))] * EPOCHS
    assert recomputed(seed, peers) == told, "the views tell otherwise than the scripts"
    for peer in peers:  # a journal that tells otherwise is no proof
        path = peer.home / "metrics.jsonl"
        first, *others = path.read_text().splitlines()
        line = json.loads(first)
        line["said"][0][0] += 1
        path.write_text("\n".join([json.dumps(line), *others]) + "\n")
    with pytest.raises(UserError, match="counted other samples than follow from its views"):
        recomputed(seed, peers)


@pytest.mark.long
def test_an_epoch_is_the_same_samples_when_peers_come_die_and_stop(cluster: Cluster, data: Path) -> None:
    """One of two is killed in the first epoch, another joins; then all are stopped and go on."""
    seed = cluster.seed(data, "--name", "tiny", "--replicas", "4")
    a, b, c = join(cluster, seed, NAMES[:3], epochs=MANY_EPOCHS, slow=True)
    for peer in (a, b, c):
        cluster.listening(peer)
    train_together(cluster, [a, b, c])
    when = c.kill_tree()
    train_together(cluster, [a, b], after=when)
    [d] = join(cluster, seed, NAMES[3:], epochs=MANY_EPOCHS, slow=True, together=1)
    cluster.listening(d)
    train_together(cluster, [a, b, d], after=when)
    assert ask([a.address], "stop")["stopping"]
    cluster.ended([a, b, d])
    stopped = max(line["time"] for line in a.rounds())
    for peer in (a, b, d):
        cluster.restart(peer)
    train_together(cluster, [a, b, d], after=stopped)
    cluster.hurry()
    cluster.ended([a, b, d])
    check_finished([p.home for p in (a, b, d)], [c.home], run="sees", epochs=MANY_EPOCHS)
    peers = [a, b, c, d]
    counted = recomputed(seed, peers)
    assert each_epoch(counted, MANY_EPOCHS) == [Counter(keys(data))] * MANY_EPOCHS
    assert {peer_id for peer_id, _ in counted} == {p.peer_id for p in peers}, "not all have trained"
    told = written(cluster)
    for of, samples in counted.items():  # what was lost with a round was trained on again, perhaps by others
        assert not Counter(samples) - Counter(told[of]), f"{of} counts what it never trained on"


@pytest.mark.parametrize("samples", [1, 2, 9])
def test_fewer_samples_than_peers_or_than_a_batch(cluster: Cluster, tmp_path: Path, samples: int) -> None:
    few = write_samples(tmp_path / "few", samples)
    seed = cluster.seed(few, "--name", "tiny")
    peers = join(cluster, seed, NAMES[:3])
    cluster.ended(peers)
    check_finished([p.home for p in peers], run="sees", epochs=EPOCHS)
    assert each_epoch(written(cluster)) == [Counter(keys(few))] * EPOCHS
