"""Like train.py, but it writes down the keys of each batch that it has trained on, as a user would check them."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import p2p_dmc as dmc


def decode(sample: dict) -> tuple[torch.Tensor, str]:
    """(16,) float from 0 to 1, and the sample's key; of another data set than "tiny" with its name."""
    of = "" if sample["__dataset__"] == "tiny" else f"{sample['__dataset__']}: "
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).float() / 255, of + sample["__key__"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, required=True, help="folder for a file of each process")
    parser.add_argument(
        "--mix", type=json.loads, help="weights of several data sets by name, instead of tiny"
    )
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--slow", metavar="FILE", help="while it exists, each step takes a tenth of a second")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.record.mkdir(parents=True, exist_ok=True)
    with dmc.connect() as peer, (args.record / f"{os.getpid()}.jsonl").open("w") as record:
        data = peer.dataset(args.mix or "tiny")
        model = nn.Linear(16, 1)
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), peer, tau=4)
        for epoch in peer.loader(data, args.batch_size, args.epochs, decode=decode).epochs():
            for x, keys in epoch:
                optimizer.zero_grad()
                loss = (model(x) ** 2).mean()
                loss.backward()
                if args.slow and os.path.exists(args.slow):
                    time.sleep(0.1)
                record.write(json.dumps({"peer": peer.peer_id, "epoch": epoch.index, "keys": keys}) + "\n")
                record.flush()
                optimizer.step(loss)


if __name__ == "__main__":
    main()
