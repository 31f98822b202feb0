"""How a round's payload is written: the run's setting, and which scheme it means for one round.

A pure function of what all members' headers say, so that all write and read the same (DESIGN.md section 7: a size that
differs between two members ends gloo's process).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AUTO", "PLAIN", "SCHEMES", "SETTINGS", "Compression", "Measured"]

SCHEMES = ("none", "bf16", "int8", "int4", "topk")
AUTO = "auto"
SETTINGS = (*SCHEMES, AUTO)

ITEM_BYTES = 4
SMALL_BYTES = 1 << 20
"""Of parameters: a payload so small takes as long as its messages' way, in whatever form."""
INT8_BELOW_MBIT = 1000
"""Slower than this: a quarter of the bytes is worth the coding."""
BF16_BELOW_MBIT = 4000
"""Slower than this: half of them is. Coding costs a core about as much as 10 Gbit/s of float32 last."""


class Measured(NamedTuple):
    """A member's last reduction, as its header says; zeros when there was none."""

    bytes_sent: int
    comm_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """The run's setting, part of its fingerprint; ValueError for an unknown one."""

    setting: str = "none"
    parameters: int = 0
    """Elements of the flat vector."""

    def __post_init__(self) -> None:
        if self.setting not in SETTINGS:
            raise ValueError(f"compress {self.setting!r}: it is one of {', '.join(SETTINGS)}")

    def scheme(self, headers: Sequence[Measured]) -> str:
        """Of the round that these headers open, in any order.

        "auto": by the fastest that anybody's last reduction was, for time in it includes waiting for others. It was
        measured with the coding of that round, so a scheme is left for one with fewer bytes when the links got
        slower, and for one with more only when they got much faster. Before anything is measured: "none".
        """
        if self.setting != AUTO:
            return self.setting
        if self.parameters * ITEM_BYTES < SMALL_BYTES:
            return "none"
        mbit = max(
            (8 * h.bytes_sent // h.comm_us for h in headers if h.bytes_sent and h.comm_us), default=None
        )
        if mbit is None or mbit >= BF16_BELOW_MBIT:
            return "none"
        return "bf16" if mbit >= INT8_BELOW_MBIT else "int8"


PLAIN = Compression()
