"""What every foreign peer does: the local step that all contestants share, and a line for each complete step.

Runs in the contestants' own environments: torch and the standard library, nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import torch
import torch.nn.functional as F


def arguments(*more: str) -> argparse.Namespace:
    """What the benchmark gives to each peer; ``more``: names of further options, each a text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", type=int, required=True)
    for name in more:
        parser.add_argument(f"--{name}", default="")
    torch.set_num_threads(1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    return args


class Task:
    """One linear layer of width x width float32 parameters and a sample to step on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = torch.nn.Linear(args.width, args.width, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._x = torch.full((1, args.width), 0.5)
        self._pause_s = args.pause_s

    def backward(self, model: torch.nn.Module | None = None) -> None:
        """Gradients of one batch; ``model``: what wraps this one."""
        self.optimizer.zero_grad()
        F.mse_loss((model or self.model)(self._x), self._x).backward()
        time.sleep(self._pause_s)


class StepFile:
    """The file that RECOVERY_STEPS names: one line a complete step."""

    def __init__(self) -> None:
        self._file = open(os.environ["RECOVERY_STEPS"], "a", buffering=1)  # noqa: SIM115 as long as the process

    def write(self, number: int, world: int, group: str) -> None:
        step = {"time": time.time(), "number": number, "world": world, "group": group, "digest": ""}
        self._file.write(json.dumps(step) + "\n")
