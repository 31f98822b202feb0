"""The learning rate, as headers tell it."""

from __future__ import annotations

import contextlib
import math

import torch

from p2p_dmc.wire.trainer_messages import MOST_RATE_NANO


def rate_nano(optimizer: torch.optim.Optimizer | None) -> int:
    """The first group's learning rate in billionths, at least 1; 0 when it has none that is a positive number."""
    groups = optimizer.param_groups if optimizer is not None else []
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else 0.0
        if math.isfinite(rate) and rate > 0:
            return max(1, round(min(rate * 1e9, MOST_RATE_NANO)))
    return 0
