"""A classifier of source text whose training can be repeated bit for bit, whatever the order of the sums.

A perceptron on hashed pairs of bytes: which package of the standard library is a piece of text from? Parameters are
float32 between 1 and 2, so they are multiples of 2^-23. A step adds and subtracts small multiples of 2^-16, scores are
sums in float64, and a round adds at most some thousand steps: all of that is exact. Only the division by the weights
rounds, once, as IEEE 754 says.
"""

from __future__ import annotations

import torch

CLASSES, FEATURES = 8, 4096
MOST_OF_A_KIND = 8
LEARNING_RATE = 2.0**-16
LOW, HIGH = 1 + 2.0**-6, 2 - 2.0**-6


def initial() -> torch.Tensor:
    """Parameters before the first round: (CLASSES, FEATURES)."""
    return torch.full((CLASSES, FEATURES), 1.5)


def features(text: bytes) -> torch.Tensor:
    """How often each hashed pair of neighbouring bytes is there, at most MOST_OF_A_KIND: (FEATURES,)."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    pairs = (data[:-1] * 257 + data[1:] * 31) % FEATURES
    return torch.bincount(pairs, minlength=FEATURES).clamp_(max=MOST_OF_A_KIND).float()


def label(key: str) -> int:
    """The class is the name of the sample's folder."""
    return int(key.split("/")[0])


def mistake(parameters: torch.Tensor, x: torch.Tensor, wanted: int) -> torch.Tensor:
    """What the perceptron lowers: how much higher the best wrong class scores than the right one, at least 0."""
    guess = int((parameters.detach().double() @ x.double()).argmax())
    return ((parameters[guess] - parameters[wanted]) * x).sum()


def stepped(parameters: torch.Tensor, x: torch.Tensor, wanted: int) -> torch.Tensor:
    """Parameters after one step on one sample, without autograd or any optimizer."""
    guess = int((parameters.double() @ x.double()).argmax())
    after = parameters.clone()
    after[guess] -= LEARNING_RATE * x
    after[wanted] += LEARNING_RATE * x
    return after.clamp_(LOW, HIGH)
