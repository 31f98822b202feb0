"""A script whose steps take as long as a machine of some speed needs, without using this one's processors."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import p2p_dmc as dmc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--later-ms", type=float, help="from the middle of the second epoch on")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--per-epoch", type=int, required=True, help="samples")
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    with dmc.connect() as peer:
        data = peer.dataset("numbers")
        model = nn.Linear(16, 1)
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.01), peer, tau=4)
        loader = peer.loader(data, 4, args.epochs, decode=decode, seed=args.seed)
        step_s = args.step_ms / 1000
        for epoch in loader.epochs():
            began_s = time.monotonic()
            for x in epoch:
                end_s = time.monotonic() + step_s
                optimizer.zero_grad()
                loss = (model(x) ** 2).mean()
                loss.backward()
                time.sleep(max(0.0, end_s - time.monotonic()))
                optimizer.step(loss)
                if args.later_ms and epoch.index == 1 and time.monotonic() - began_s > 2.0:
                    step_s = args.later_ms / 1000


def decode(sample: dict[str, bytes]) -> torch.Tensor:
    """(16,) float from 0 to 1."""
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).float() / 255


if __name__ == "__main__":
    main()
