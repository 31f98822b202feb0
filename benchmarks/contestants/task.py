"""The task that all contestants of vs_ddp share: model, samples, and what each host records of its training."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SIDE = 28
PIXELS = SIDE * SIDE
CLASSES = 10
LAYERS = 5


def options(doc: str | None) -> argparse.ArgumentParser:
    """What every contestant is told."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data", type=Path, required=True, help="folder of <class>/<number>.raw")
    parser.add_argument("--test", type=Path, required=True, help="test.npz: images, labels")
    parser.add_argument("--record", type=Path, required=True, help="folder for <host>.json")
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser


def network(hidden: int, seed: int) -> nn.Module:
    """A perceptron of five layers; the same parameters for the same seed."""
    torch.set_num_threads(1)  # hosts share the machine's cores
    torch.manual_seed(seed)
    widths = [PIXELS, *[hidden] * (LAYERS - 1), CLASSES]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layer = nn.Linear(inputs, outputs)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    warm_up(model)
    return model


def warm_up(model: nn.Module) -> None:
    """The first pass of a process is slow; no contestant's clock should see it."""
    model(torch.zeros(2, PIXELS)).sum().backward()
    model.zero_grad()


def tensors(raw: bytes, name: str) -> tuple[torch.Tensor, int, int]:
    """Pixels from -0.5 to 0.5, class and number of the sample <class>/<number>."""
    label, number = name.split("/")
    pixels = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    return pixels / 255 - 0.5, int(label), int(number)


def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss and gradients of one batch; the optimizer's step is the caller's."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


class Record:
    """Steps of one host with their times, and its interface's counters when training began and ended."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._steps: list[tuple[float, int, float]] = []
        self._seen: list[tuple[int, int]] = []

    def begin(self) -> None:
        """Right before the first step."""
        self._facts |= {"begin_s": time.monotonic(), "bytes_begin": interface_bytes()}

    def step(self, loss: float, epoch: int, numbers: torch.Tensor) -> None:
        """One local step is done, its round too if one was due."""
        self._steps.append((time.monotonic(), len(numbers), loss))
        self._seen += [(epoch, int(number)) for number in numbers]

    def end(self) -> None:
        """Right after the last step and whatever makes it the model's."""
        self._facts |= {"end_s": time.monotonic(), "bytes_end": interface_bytes()}

    def write(self, model: nn.Module, args: argparse.Namespace, evaluate: bool) -> None:
        """<host>.json, with the final parameters' digest; ``evaluate`` adds loss and accuracy on the test set."""
        facts = self._facts | {"steps": self._steps, "seen": self._seen, "digest": digest(model)}
        facts["parameters"] = sum(p.numel() for p in model.parameters())
        if evaluate:
            facts |= test(model, args.test)
        path = args.record / f"{os.environ['NETLAB_HOST']}.json"
        path.write_text(json.dumps(facts))


def digest(model: nn.Module) -> str:
    """Of all parameters, bit for bit."""
    hasher = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        hasher.update(parameter.detach().numpy().tobytes())
    return hasher.hexdigest()


def test(model: nn.Module, path: Path) -> dict[str, float]:
    """Mean loss and accuracy on samples that nobody trained on."""
    stored = np.load(path)
    images = torch.from_numpy(stored["images"]).view(-1, PIXELS) / 255 - 0.5
    labels = torch.from_numpy(stored["labels"]).long()
    with torch.no_grad():
        logits = model(images)
        loss = F.cross_entropy(logits, labels).item()
    return {"test_loss": loss, "test_accuracy": (logits.argmax(1) == labels).double().mean().item()}


def interface_bytes() -> tuple[int, int]:
    """Sent and received by this host's eth0 since it was made (/proc/net/dev is the namespace's own)."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            columns = numbers.split()
            return int(columns[8]), int(columns[0])
    raise RuntimeError("this host has no eth0: start it with `netlab exec`")
