"""A small model on the files that `tests.system.cluster.write_samples` makes; its faults are options.

Like any user's script, and as quick as one can be: a step takes about a millisecond. While the file of ``--slow``
exists each step takes ``--delay-ms`` more, as a real model's would, without using the machine's processors: so a
test decides how long a run lasts.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import p2p_dmc as dmc

FEATURES, CLASSES = 16, 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="tiny")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tau", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--delay-ms", type=float, default=100.0)
    parser.add_argument("--slow", metavar="FILE")
    parser.add_argument("--gate", nargs=2, metavar="FILE", help="be ready once it is there; made on arrival")
    parser.add_argument("--fault", choices=["raise", "kill", "nan"], help="what happens at the sample KEY")
    parser.add_argument("--key", metavar="KEY", action="append", help="default: the first one")
    parser.add_argument("--on-error", choices=["stop", "skip"], default="stop")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--compress", default="none")
    return parser.parse_args()


def decode(sample: dict, args: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """(16,) float from 0 to 1, and the class, which is the folder's name; or the fault that is asked for."""
    x = torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).float() / 255
    if args.fault and (args.key is None or sample["__key__"] in args.key):
        if args.fault == "raise":
            raise ValueError(f"sample {sample['__key__']} is broken")
        if args.fault == "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        x = x * float("nan")
    return x, int(sample["__key__"].split("/")[0])


def linger(args: argparse.Namespace) -> None:
    """The time of a step, cut short when the file goes away."""
    end_s = time.monotonic() + args.delay_ms / 1000
    while args.slow and os.path.exists(args.slow) and time.monotonic() < end_s:
        time.sleep(0.01)


def wait_at(gate: str = "", arrived: str = "") -> None:
    """Several peers are ready at the same moment."""
    if gate:
        Path(arrived).touch()
    while gate and not os.path.exists(gate):
        time.sleep(0.01)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))  # it ends by itself when a test wants it to
    torch.set_num_threads(1)
    with dmc.connect() as peer:
        data = peer.dataset(args.data)
        wait_at(*args.gate or ())
        model = nn.Sequential(nn.Linear(FEATURES, args.hidden), nn.ReLU(), nn.Linear(args.hidden, CLASSES))
        sgd = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
        optimizer = dmc.Optimizer(sgd, peer, tau=args.tau, compress=args.compress)
        loader = peer.loader(
            data,
            args.batch_size,
            args.epochs,
            decode=lambda s: decode(s, args),
            on_error=args.on_error,
            num_workers=args.workers,
        )
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            linger(args)
            optimizer.step(loss)
        with torch.no_grad():
            total = sum(float(p.double().sum()) for p in model.parameters())
        print(f"parameters sum to {total!r}", flush=True)


if __name__ == "__main__":
    main()
