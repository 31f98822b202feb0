"""The script that peers train with: a model of a given size whose steps take time, but no processor and no memory.

One weight is trained; the others, without a gradient, are there to be averaged and downloaded.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

import p2p_dmc as dmc

POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-bytes", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--gate", required=True, metavar="FILE", help="be ready once this file is there")
    parser.add_argument("--at-gate", metavar="FILE", help="made when the script waits for it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(1))
    ballast = torch.nn.Parameter(torch.ones(args.model_bytes // 4 - 1))
    with dmc.connect() as peer:
        data = peer.dataset("joining")
        if args.at_gate:
            Path(args.at_gate).touch()
        while not os.path.exists(args.gate):
            time.sleep(POLL_S)
        sgd = torch.optim.SGD([{"params": [weight, ballast]}], lr=1e-3)
        optimizer = dmc.Optimizer(sgd, peer, tau=1)
        for x in peer.loader(data, batch_size=1, epochs=1000, decode=lambda s: float(s["bin"][0])):
            optimizer.zero_grad()
            loss = (weight * x).mean()
            loss.backward()
            time.sleep(args.step_s)
            optimizer.step(loss)


if __name__ == "__main__":
    main()
