"""A small byte-level transformer on Python sources; each sample is one .py file.

dmc-peer seed-dataset /usr/lib/python3.11 --name stdlib --include '*.py'
dmc-peer join tcp://127.0.0.1:7400 examples/train_stdlib.py --epochs 3
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import zlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import p2p_dmc as dmc

PAD = 256  # also stands before the first byte


class ByteTransformer(nn.Module):
    """Next-byte prediction: about 0.26 million parameters at the default width."""

    def __init__(self, window: int, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(PAD + 1, width)
        self.place = nn.Parameter(0.02 * torch.randn(window, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, PAD + 1)
        mask = nn.Transformer.generate_square_subsequent_mask(window)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) + self.place  # batch, window, width
        logits: torch.Tensor = self.head(self.body(hidden, mask=self.mask, is_causal=True))
        return logits


def window_of(sample: dict[str, Any], size: int, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets: ``size`` bytes of the file, padded if it is short, at a place that its name and the
    epoch decide.
    """
    text = sample["py"]
    place = zlib.crc32(sample["__key__"].encode(errors="surrogateescape"), epoch)
    start = place % max(1, len(text) - size)
    target = torch.full((size,), PAD)
    part = torch.tensor(list(text[start : start + size]), dtype=torch.long)
    target[: len(part)] = part
    return torch.cat([torch.tensor([PAD]), target[:-1]]), target


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over the bytes that are there; an empty file has none, so the mean is taken by hand."""
    total = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")
    return total / (target != PAD).sum().clamp(min=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", default="stdlib", help="the data set's name")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--window", type=int, default=64, help="bytes of each file")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the model and of the data's order")
    parser.add_argument("--tau", type=int, help="local steps per round; AdaComm decides if not given")
    parser.add_argument("--tau0", type=int, default=8, help="AdaComm's first tau")
    parser.add_argument("--t0", type=float, default=5.0, help="seconds between AdaComm's decisions")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # several peers may share this machine
    torch.manual_seed(args.seed)
    with dmc.connect() as peer:
        data = peer.dataset(args.data)
        model = ByteTransformer(args.window).to(peer.device)
        tau = args.tau or dmc.AdaComm("basic", args.tau0, args.t0, min_utilisation=0)
        optimizer = dmc.Optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr), peer, tau=tau)

        def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
            return window_of(sample, args.window, epoch.index)

        loader = peer.loader(data, args.batch_size, args.epochs, decode=decode, seed=args.seed)
        for epoch in loader.epochs():
            steps, total = 0, 0.0
            for x, y in epoch:
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                optimizer.step(loss)
                steps, total = steps + 1, total + loss.item()
            mean = total / max(1, steps)
            print(
                f"epoch {epoch.index}: {steps} steps here, mean loss {mean:.3f}, tau {optimizer.tau}",
                flush=True,
            )
        if peer.is_first:
            print(f"done: {len(data)} files, {args.epochs} epochs", flush=True)


if __name__ == "__main__":
    main()
