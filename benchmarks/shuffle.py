"""Is the order of an epoch as good as a full shuffle? Loss and accuracy on label-sorted MNIST.

The worst data set for it: all zeros first, then all ones and so on. Four members train on it as peers do, each on what
the product's own assignment gives it in the product's own order, tau local steps and an average; everything but the
order of the samples is the same. Orders: "full shuffle" of all samples, dealt to the members; "spread", the default of
seed-dataset, which spreads samples over shards by a seeded shuffle; "keep", label-sorted shards as --order keep makes
them, with several shards interleaved or one after the other.

--data is a folder with MNIST's four files (train-images-idx3-ubyte.gz and so on).

Keys:
  epochs, members, tau, batch, shards, seeds, lr
  orders      per order: loss and accuracy on the 10000 test samples after the last epoch, mean over the seeds; loss_sd
              over the seeds; classes_in_batch, of the 10, mean over the first epoch's batches
  violations  an order in which a sample of an epoch is missing or comes twice
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench
import numpy as np

from p2p_dmc.core.assignment import assign
from p2p_dmc.core.braids import INTERLEAVED, in_turn
from p2p_dmc.core.ledger import Ledger, sample_permutation

MEMBERS, TAU, BATCH, SHARDS, HIDDEN, LR = 4, 8, 32, 256, 64, 0.1
ORDERS = {
    "full shuffle": 0,
    "spread": INTERLEAVED,
    "keep, 16 interleaved": 16,
    "keep, 8 interleaved": 8,
    "keep, 1 at a time": 1,
}
"""How many shards are interleaved."""


def parser() -> argparse.ArgumentParser:
    made = bench.parser(__doc__, "shuffle")
    made.add_argument("--data", type=Path, metavar="FOLDER", help="where MNIST's files lie")
    return made


def read_mnist(folder: Path, part: str) -> tuple[Any, Any]:
    """Images (n, 784) float32 from 0 to 1, labels (n,) int64."""
    try:
        images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    except OSError as error:
        raise bench.BenchError(f"{error}: give MNIST's folder with --data") from None
    x = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 784).astype(np.float32) / 255
    return x, np.frombuffer(labels, np.uint8, offset=8).astype(np.int64)


def orders(kind: str, samples: int, seed: int, epoch: int) -> list[list[int]]:
    """Per member the samples of its epoch in order, as places in the label-sorted data set."""
    if kind == "full shuffle":
        every = np.random.default_rng([seed, epoch]).permutation(samples)
        return [part.tolist() for part in np.array_split(every, MEMBERS)]
    places = np.arange(samples)
    if kind == "spread":
        places = np.random.default_rng(seed).permutation(samples)
    bounds = np.linspace(0, samples, SHARDS + 1).astype(int).tolist()
    counts = [hi - lo for lo, hi in pairwise(bounds)]
    digest, rng = b"label-sorted MNIST", random.Random(seed)
    held: list[set[int]] = [set() for _ in range(MEMBERS)]
    for shard in range(SHARDS):
        for member in rng.sample(range(MEMBERS), 2):
            held[member].add(shard)
    ledger = Ledger.start(digest, counts, seed, epoch + 1)
    for _ in range(epoch):
        ledger = ledger.skip(ledger.remaining())
    assigned = assign(ledger, MEMBERS, held, [1] * MEMBERS, [()] * MEMBERS, lanes=ORDERS[kind])
    found = []
    for braids in assigned.lists:
        mine = []
        for shard, at in in_turn(braids):
            order = sample_permutation(digest, seed, epoch, shard, counts[shard])
            mine.append(int(places[bounds[shard] + order[at]]))
        found.append(mine)
    return found


def train(
    kind: str, train_set: Any, test_set: Any, seed: int, epochs: int
) -> tuple[dict[str, Any], list[str]]:
    """Loss and accuracy at the end; and what is wrong with the order."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = (torch.from_numpy(part) for part in train_set)
    net = torch.nn.Sequential(torch.nn.Linear(784, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))
    anchor, wrong, classes = torch.nn.utils.parameters_to_vector(net.parameters()).detach(), [], []
    for epoch in range(epochs):
        mine = orders(kind, len(x), seed, epoch)
        if sorted(place for part in mine for place in part) != list(range(len(x))):
            wrong.append(f"{kind}, seed {seed}, epoch {epoch}: not every sample once")
        if epoch == 0:
            batches = [part[at : at + BATCH] for part in mine for at in range(0, len(part), BATCH)]
            classes = [len(set(y[batch].tolist())) for batch in batches]
        for first in range(0, max(map(len, mine)), TAU * BATCH):
            total, weights = torch.zeros_like(anchor), 0
            for part in mine:
                torch.nn.utils.vector_to_parameters(anchor.clone(), net.parameters())
                stretch = part[first : first + TAU * BATCH]
                for at in range(0, len(stretch), BATCH):
                    batch = stretch[at : at + BATCH]
                    gradients = torch.autograd.grad(
                        F.cross_entropy(net(x[batch]), y[batch]), net.parameters()
                    )
                    with torch.no_grad():
                        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                            parameter -= LR * gradient
                after = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
                total += (anchor - after) * len(stretch)
                weights += len(stretch)
            anchor = anchor - total / weights
    torch.nn.utils.vector_to_parameters(anchor, net.parameters())
    test_x, test_y = (torch.from_numpy(part) for part in test_set)
    with torch.no_grad():
        said = net(test_x)
        loss = float(F.cross_entropy(said, test_y))
        accuracy = float((said.argmax(1) == test_y).float().mean())
    return {"loss": loss, "accuracy": accuracy, "classes": statistics.mean(classes)}, wrong


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    if options.data is None:
        raise bench.BenchError("--data is missing: give MNIST's folder with it")
    x, y = read_mnist(options.data, "train")
    test_set = read_mnist(options.data, "t10k")
    by_label = np.argsort(y, kind="stable")
    if options.quick:
        by_label = by_label[::6]
    train_set = x[by_label], y[by_label]
    epochs, seeds = (2, 1) if options.quick else (3, 3)
    result: dict[str, Any] = {}
    violations: list[str] = []
    for kind in ORDERS:
        runs = []
        for seed in range(options.seed, options.seed + seeds):
            bench.say(f"{kind}, seed {seed}")
            facts, wrong = train(kind, train_set, test_set, seed, epochs)
            runs.append(facts)
            violations += wrong
        losses = [run["loss"] for run in runs]
        result[kind] = {
            "loss": round(statistics.mean(losses), 4),
            "loss_sd": round(statistics.pstdev(losses), 4),
            "accuracy": round(statistics.mean(run["accuracy"] for run in runs), 4),
            "classes_in_batch": round(statistics.mean(run["classes"] for run in runs), 2),
        }
    rows = [("order", "loss", "sd", "accuracy", "classes in a batch")]
    for kind, facts in result.items():
        rows.append((kind, *(f"{facts[k]:.4f}" for k in ("loss", "loss_sd", "accuracy", "classes_in_batch"))))
    print(bench.table(rows))
    made = {"epochs": epochs, "members": MEMBERS, "tau": TAU, "batch": BATCH, "shards": SHARDS, "lr": LR}
    facts = {**made, "seeds": seeds, "orders": result, "conditions": bench.conditions()}
    return bench.finish(options, facts, violations)


if __name__ == "__main__":
    bench.run(main)
