"""Like any user's script; what it computes is in chaos_model. While the file of ``--slow`` exists steps take longer."""

from __future__ import annotations

import argparse
import os
import time

import chaos_model as model
import torch

import p2p_dmc as dmc


class BoundedSGD(torch.optim.SGD):
    """Plain SGD that keeps parameters between LOW and HIGH."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(model.LOW, model.HIGH)


def linger(slow: str, delay_ms: float) -> None:
    """The time of a step, cut short when the file goes away."""
    end_s = time.monotonic() + delay_ms / 1000
    while os.path.exists(slow) and time.monotonic() < end_s:
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--tau", type=int, default=4)
    parser.add_argument("--slow", default="")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with dmc.connect() as peer:
        data = peer.dataset("sources")
        weights = torch.nn.Parameter(model.initial())
        inner = BoundedSGD([weights], lr=model.LEARNING_RATE)
        optimizer = dmc.Optimizer(inner, peer, tau=args.tau)
        loader = peer.loader(data, 1, args.epochs, decode=lambda s: (s["txt"], s["__key__"]), collate_fn=list)
        for [(text, key)] in loader:
            optimizer.zero_grad()
            loss = model.mistake(weights, model.features(text), model.label(key))
            loss.backward()
            linger(args.slow, args.delay_ms)
            optimizer.step(loss)


if __name__ == "__main__":
    main()
