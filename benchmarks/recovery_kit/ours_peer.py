"""The script that p2p_dmc's peers train with: one linear layer, a round after each local step."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

import p2p_dmc as dmc


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    with dmc.connect() as peer:
        data = peer.dataset("recovery")
        model = torch.nn.Linear(args.width, args.width, bias=False)
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), peer, tau=1)

        def decode(sample: dict) -> torch.Tensor:
            return torch.full((args.width,), sample["bin"][0] / 255)

        for x in peer.loader(data, batch_size=1, epochs=1000, decode=decode):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            time.sleep(args.pause_s)
            optimizer.step(loss)


if __name__ == "__main__":
    main()
