"""A small network on scikit-learn's handwritten digits, written out as loose files first.

python examples/train_digits.py --write digits        # 1797 files digits/<class>/<number>.pgm
dmc-peer seed-dataset digits
dmc-peer join tcp://127.0.0.1:7400 examples/train_digits.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import p2p_dmc as dmc

HEADER = b"P5\n8 8\n16\n"  # a portable graymap of 8 x 8 pixels from 0 to 16


def write(folder: Path) -> int:
    """One file per digit, in a folder per class; how many there are."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / str(label) / f"{number:04}.pgm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(HEADER + bytes(image.astype("uint8")))
    return len(images)


def decode(sample: dict) -> tuple[torch.Tensor, int]:
    """The picture (1, 8, 8) from 0 to 1 and its class, which is the folder's name."""
    pixels = torch.frombuffer(bytearray(sample["pgm"][len(HEADER) :]), dtype=torch.uint8)
    return pixels.view(1, 8, 8) / 16, int(sample["__key__"].split("/")[0])


def network() -> nn.Module:
    """About 40,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="DIR", help="only write the digits into DIR")
    parser.add_argument("--data", default="digits", help="the data set's name")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--tau", type=int, default=4, help="local steps per round")
    args = parser.parse_args()
    if args.write:
        print(f"{write(args.write)} digits written: dmc-peer seed-dataset {args.write}")
        return

    with dmc.connect() as peer:
        data = peer.dataset(args.data)
        model = network().to(peer.device)
        sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        optimizer = dmc.Optimizer(sgd, peer, tau=args.tau)
        for x, y in peer.loader(data, args.batch_size, args.epochs, decode=decode):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step(loss)

        images, labels = zip(*map(decode, data), strict=True)
        with torch.no_grad():
            guesses = model(torch.stack(images).to(peer.device)).argmax(dim=1).cpu()
        accuracy = (guesses == torch.tensor(labels)).float().mean()
        print(f"{peer.name}: {accuracy:.1%} of {len(data)} digits recognised", flush=True)


if __name__ == "__main__":
    main()
