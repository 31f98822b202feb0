"""The outer optimizers of a script, and their step on the anchor (`core/outer.py` has the formulas)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from p2p_dmc.core.outer import AVERAGE, NANO, OuterPolicy
from p2p_dmc.errors import UserError
from p2p_dmc.train import state


@dataclass(frozen=True)
class Block:
    """Block momentum: u <- beta u + D, x <- x - u, with D the peers' averaged delta and x the shared parameters.

    Source: Wang and Joshi, MLSys 2019, who take beta 0.3 over an inner momentum of 0.9. ``beta`` from 0 to below 1.
    """

    beta: float = 0.3

    def to_policy(self) -> OuterPolicy:
        """As the peers agree on it; UserError."""
        try:
            return OuterPolicy(kind="block", momentum_nano=round(self.beta * NANO))
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{self!r}: {error}") from None


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's outer step: u <- momentum u + D, x <- x - lr (D + momentum u), with D the peers' averaged delta.

    Rounds of fewer than 8 local steps are averaged plainly. Source: Douillard et al., "DiLoCo", 2023, who take it over
    an inner AdamW and hundreds of local steps. ``lr`` above 0 and below 10, ``momentum`` from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def to_policy(self) -> OuterPolicy:
        """As the peers agree on it; UserError."""
        try:
            return OuterPolicy(
                kind="nesterov",
                rate_nano=round(self.lr * NANO),
                momentum_nano=round(self.momentum * NANO),
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{self!r}: {error}") from None


Outer = Literal["average", "block", "nesterov"] | Block | Nesterov


def policy_of(outer: Outer) -> OuterPolicy:
    """What the script means; UserError."""
    if isinstance(outer, Block | Nesterov):
        return outer.to_policy()
    if outer == "average":
        return AVERAGE
    if outer in ("block", "nesterov"):
        return (Block() if outer == "block" else Nesterov()).to_policy()
    raise UserError(
        f"outer={outer!r}: it is 'average', 'block', 'nesterov', dmc.Block(...) or dmc.Nesterov(...)"
    )


def advance(
    before: torch.Tensor,
    reduced: torch.Tensor,
    divisor: int,
    coefficients: tuple[float, ...],
    out: torch.Tensor,
) -> None:
    """``out`` becomes the state after a round: float32, the anchor and behind it the momentum, if there is one.

    ``reduced`` (size of the anchor) is used up; ``coefficients`` are an `OuterStep`, () for plain averaging. The same
    operations as `agent.catch_up.advance`, each rounded by itself.
    """
    size = reduced.numel()
    anchor, result = before[:size], out[:size]
    if not coefficients or not divisor:
        state.average(anchor, reduced, divisor, out=result)
        out[size:].copy_(before[size:])
        return
    keep, gain, now, ahead = coefficients
    momentum = out[size:]
    reduced.div_(float(divisor))
    torch.mul(before[size:], keep, out=momentum)
    torch.mul(reduced, gain, out=result)
    momentum.add_(result)
    reduced.mul_(now)
    torch.mul(momentum, ahead, out=result)
    reduced.add_(result)
    torch.sub(anchor, reduced, out=result)
