"""Several data sets in one run, each in whole passes: real processes, a kill, a stop, and everything counts once."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from p2p_dmc.agent.client import ask
from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.samples import read_index
from p2p_dmc.observe.audit import trained_on
from p2p_dmc.observe.seen import seen
from tests.system.checks import check_finished
from tests.system.cluster import Cluster, Peer, keys, write_samples
from tests.system.commands import facts
from tests.system.scenario import START_S, train_together

SCRIPT = Path(__file__).parent / "scripts" / "sees.py"
EPOCHS = 2
WEB, CODE = 800, 240
LONG = ("--max-shard-size", "64KiB")
"""Shards of more samples than the mixture's have."""
DUE = WEB + 2 * CODE
MIX = {"web": 5, "code": 3}
"""Weights that are met when all of code comes twice while web comes once."""
PASSES = {"web": 1, "code": 2}


def join(cluster: Cluster, seed: Peer, names: Sequence[str]) -> list[Peer]:
    words = ["--record", str(cluster.root / "record"), "--epochs", str(EPOCHS), "--slow", str(cluster.slow)]
    words += ["--mix", json.dumps(MIX)]
    options = ["--min-peers", str(len(names)), "--checkpoint-every", "1s"]
    return [cluster.join(name, seed, *words, options=options, script=SCRIPT) for name in names]


def recomputed(homes: Sequence[Path]) -> dict[int, Counter[tuple[int, str]]]:
    """Of each epoch, how often each sample of each shard of the mixture counted, from what the homes say and hold."""
    _, mixture = trained_on(homes, "sees")
    names = []
    for shard in range(len(mixture)):
        manifest, at, first = mixture.where(shard)
        folders = [home / "store" / manifest.digest.hex() for home in homes]
        paths = [shard_path(folder, manifest.shard_digests[at]) for folder in folders]
        found_keys = tuple(read_index(next(path for path in paths if path.exists())).keys())
        names.append([f"{manifest.name}: {key}" for key in found_keys[first:]])
    found: dict[int, Counter[tuple[int, str]]] = defaultdict(Counter)
    for one in seen(homes, "sees"):
        found[one.epoch].update((shard, names[shard][index]) for shard, index in one.samples)
    return found


def counted_in(peer: Peer, epoch: int, after: float = 0.0) -> int:
    """Samples that its rounds after a time counted in an epoch."""
    lines = [line for line in peer.rounds(after) if line["epoch"] == epoch]
    return sum(hi - lo for line in lines for braid in line["counted"] for _, lo, hi in braid)


def test_two_data_sets_a_kill_and_a_stop_in_mid_epoch(cluster: Cluster, tmp_path: Path) -> None:
    web, code = write_samples(tmp_path / "web", WEB), write_samples(tmp_path / "code", CODE, seed=1)
    seed = cluster.seed(web, *LONG)
    cluster.seed(code, *LONG, "--join", seed.address, name="seed-code")
    a, b = join(cluster, seed, "ab")
    for peer in (a, b):
        cluster.listening(peer)
    train_together(cluster, [a, b])
    when = b.kill_tree()
    train_together(cluster, [a], after=when)
    [run] = facts(cluster, "status", a.address)["runs"]
    assert {p["name"]: p["passes"] for p in run["parts"]} == PASSES
    assert run["epoch_progress"]["total"] == DUE

    def in_mid_epoch() -> bool:
        return 0 < counted_in(a, a.rounds()[-1]["epoch"]) < 0.8 * DUE

    cluster.wait(in_mid_epoch, "an epoch's middle", START_S)
    assert ask([a.address], "stop")["stopping"]
    cluster.ended([a])
    last = a.rounds()[-1]
    for peer in (a, b):
        cluster.restart(peer)
    train_together(cluster, [a, b], after=last["time"])
    cluster.hurry()
    cluster.ended([a, b])
    assert 0 < counted_in(a, last["epoch"], after=last["time"]) < DUE, "not resumed in mid-epoch"
    assert "an epoch is 2 x code + 1 x web: 1280 samples, code 37.5%, web 62.5%\n" in a.log("out").read_text()

    found = check_finished([a.home, b.home], run="sees", epochs=EPOCHS)
    assert found.samples_counted == EPOCHS * DUE
    counted = recomputed([p.home for p in cluster.peers])
    assert sorted(counted) == list(range(EPOCHS))
    whole = Counter(f"web: {key}" for key in keys(web)) + Counter(2 * [f"code: {key}" for key in keys(code)])
    for epoch in counted.values():
        assert set(epoch.values()) == {1}, "a sample counted twice in one pass"
        assert Counter(name for _, name in epoch) == whole
