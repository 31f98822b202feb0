"""Flat float32 vectors as fewer bytes, and back: bf16, int8, int4 and topk.

What a payload says is the same bits on every processor: reading one is a conversion and one multiplication for each
element, each rounded by itself (DESIGN.md section 7). Writing one is done once and travels as bytes. Whoever writes
also learns the error, ``values - read(payload)``, which is exact: the two are within a factor of two of each other, or
the payload says zero (Sterbenz).

Everything is written and read in rows of ``width`` elements, the last one filled up with zeros, in pieces that fit a
processor's cache. Sizes depend on the scheme and the count alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

__all__ = ["Codec", "codec"]

BLOCK = 256
"""Elements that share a scale: 1.6 % of int8's bytes are scales."""
CHUNK, KEPT = 4096, 64
"""topk keeps so many of so many. Source: SparseLoCo (arXiv 2508.15706)."""
DECAY = 0.95
"""What topk multiplies its error by in each round: most of it is old. Same source."""
PIECE = 1 << 16
"""Elements worked on at a time: 256 KiB of values, and as much for each temporary, fit a second-level cache."""
LARGEST = 2.0**126
"""Greater magnitudes are written as this, and NaN as zero: what is read, and its error, are always finite."""
LEAST_SCALE = 2.0**-100
"""A block with a smaller scale is written as zeros: no subnormal is ever multiplied, whatever processors do to them."""
ALIGN = 16
"""Payloads' sizes are multiples of this, so that views of several in one buffer are aligned."""


class Codec(ABC):
    """One scheme. It keeps temporaries of a few hundred KiB: one thread at a time."""

    width: int
    """Elements of a row; parts of a vector that are coded apart begin at multiples of it."""
    row_bytes: int
    decay = 1.0
    """What the error of one round is multiplied by in the next."""
    is_sum = True
    """Whether the sum of several is coded once more by its owner, rather than everybody reading everybody's."""

    def __init__(self) -> None:
        self._work = torch.empty(PIECE // self.width, self.width)

    def size_bytes(self, count: int) -> int:
        """Of the payload of ``count`` elements."""
        return -(-self._rows(count) * self.row_bytes // ALIGN) * ALIGN

    def encode(self, values: torch.Tensor, payload: torch.Tensor, error: torch.Tensor) -> None:
        """Write ``values`` (float32) into ``payload`` (uint8, its whole size); ``error`` := values - what it says.

        A value that is not finite, or beyond 2**126, counts as zero (NaN) or as 2**126. ``values`` stay as they are;
        ``error`` may be the same tensor.
        """
        for rows, parts, left in self._pieces(values, payload, error):
            self._encode(rows, parts, left)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` := what the payload says."""
        for rows, parts, _ in self._pieces(out, payload, out):
            self._decode(parts, rows)

    def add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` += what the payload says, each element rounded once more."""
        for rows, parts, _ in self._pieces(out, payload, out):
            self._add(parts, rows)

    def _rows(self, count: int) -> int:
        return -(-count // self.width)

    def _pieces(
        self, values: torch.Tensor, payload: torch.Tensor, other: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
        """Rows of two vectors with their parts of the payload; an unfinished last row by way of a copy."""
        count, width = values.numel(), self.width
        assert payload.numel() == self.size_bytes(count), "a payload of another size"
        parts = self._parts(payload, self._rows(count))
        whole = count // width
        step = PIECE // width
        rows, others = values[: whole * width].view(-1, width), other[: whole * width].view(-1, width)
        for lo in range(0, whole, step):
            hi = min(whole, lo + step)
            yield rows[lo:hi], [part[lo:hi] for part in parts], others[lo:hi]
        rest = count - whole * width
        if rest:
            row = torch.zeros(1, width)
            row[0, :rest] = values[-rest:]
            yield row, [part[whole:] for part in parts], row
            other[-rest:] = row[0, :rest]

    @abstractmethod
    def _parts(self, payload: torch.Tensor, rows: int) -> list[torch.Tensor]:
        """Views of the payload, each with so many rows."""

    @abstractmethod
    def _encode(self, rows: torch.Tensor, parts: Sequence[torch.Tensor], error: torch.Tensor) -> None: ...

    @abstractmethod
    def _read(self, parts: Sequence[torch.Tensor], work: torch.Tensor) -> None:
        """Dense schemes: what the parts say."""

    def _decode(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        self._read(parts, rows)

    def _add(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        work = self._work[: rows.shape[0]]
        self._read(parts, work)
        rows.add_(work)


class Bf16(Codec):
    """The upper half of each float32, rounded to the nearest, ties to even: 2 bytes."""

    width, row_bytes = BLOCK, 2 * BLOCK

    def _parts(self, payload: torch.Tensor, rows: int) -> list[torch.Tensor]:
        return [payload[: rows * self.row_bytes].view(torch.bfloat16).view(rows, self.width)]

    def _encode(self, rows: torch.Tensor, parts: Sequence[torch.Tensor], error: torch.Tensor) -> None:
        work = self._work[: rows.shape[0]]
        rows = _sane(rows, *torch.aminmax(rows))
        parts[0].copy_(rows)
        work.copy_(parts[0])
        torch.sub(rows, work, out=error)

    def _read(self, parts: Sequence[torch.Tensor], work: torch.Tensor) -> None:
        work.copy_(parts[0])


class Int8(Codec):
    """Multiples of the block's greatest magnitude / 127, rounded to the nearest, ties to even: 1.016 bytes."""

    width, row_bytes = BLOCK, BLOCK + 4
    steps = 127

    def _parts(self, payload: torch.Tensor, rows: int) -> list[torch.Tensor]:
        scales = payload[: 4 * rows].view(torch.float32).view(rows, 1)
        return [
            scales,
            payload[4 * rows : rows * self.row_bytes].view(torch.int8).view(rows, self.row_bytes - 4),
        ]

    def _encode(self, rows: torch.Tensor, parts: Sequence[torch.Tensor], error: torch.Tensor) -> None:
        scales, numbers = parts
        work = self._work[: rows.shape[0]]
        torch.abs(rows, out=work)
        torch.amax(work, 1, keepdim=True, out=scales)
        rows = _sane(rows, *torch.aminmax(scales))
        inverse = _scale(scales, self.steps)
        torch.mul(rows, inverse, out=work)
        work.round_()
        self._pack(work, numbers)
        work.mul_(scales)
        torch.sub(rows, work, out=error)

    def _pack(self, work: torch.Tensor, numbers: torch.Tensor) -> None:
        numbers.copy_(work)

    def _unpack(self, numbers: torch.Tensor, work: torch.Tensor) -> None:
        work.copy_(numbers)

    def _read(self, parts: Sequence[torch.Tensor], work: torch.Tensor) -> None:
        scales, numbers = parts
        self._unpack(numbers, work)
        work.mul_(scales)


class Int4(Int8):
    """The same with 7 steps: 0.516 bytes. A byte holds an element (low half) and the one half a block after it."""

    row_bytes = BLOCK // 2 + 4
    steps = 7

    def _pack(self, work: torch.Tensor, numbers: torch.Tensor) -> None:
        whole = work.to(torch.int8)
        half = self.width // 2
        torch.bitwise_left_shift(whole[:, half:], 4, out=numbers)
        numbers.bitwise_or_(whole[:, :half].bitwise_and_(15))

    def _unpack(self, numbers: torch.Tensor, work: torch.Tensor) -> None:
        half = self.width // 2
        work[:, half:].copy_(numbers >> 4)  # arithmetic: the sign goes along
        work[:, :half].copy_((numbers << 4) >> 4)


class TopK(Codec):
    """The 64 greatest magnitudes of each 4096 elements, in int8 with one scale, and 12 bits of place: 0.04 bytes.

    Two of an element in a sum add up; sums are not coded again, for those of several peers lie in other places.
    """

    width = CHUNK
    place_bytes = KEPT * 12 // 8
    row_bytes = 4 + KEPT + place_bytes
    decay = DECAY
    is_sum = False

    def _parts(self, payload: torch.Tensor, rows: int) -> list[torch.Tensor]:
        ends = (4 * rows, (4 + KEPT) * rows, rows * self.row_bytes)
        scales, numbers, places = payload[: ends[0]], payload[ends[0] : ends[1]], payload[ends[1] : ends[2]]
        return [
            scales.view(torch.float32).view(rows, 1),
            numbers.view(torch.int8).view(rows, KEPT),
            places.view(rows, KEPT // 2, 3),
        ]

    def _encode(self, rows: torch.Tensor, parts: Sequence[torch.Tensor], error: torch.Tensor) -> None:
        scales, numbers, packed = parts
        work = self._work[: rows.shape[0]]
        rows = _sane(rows, *torch.aminmax(rows))
        torch.abs(rows, out=work)
        places = torch.topk(work, KEPT, dim=1, sorted=False).indices
        kept = torch.gather(rows, 1, places)
        torch.amax(torch.abs(kept), 1, keepdim=True, out=scales)
        inverse = _scale(scales, Int8.steps)
        rounded = torch.mul(kept, inverse).round_()
        numbers.copy_(rounded)
        first, second = places[:, 0::2], places[:, 1::2]
        packed[:, :, 0] = first & 255
        packed[:, :, 1] = (first >> 8) | ((second & 15) << 4)
        packed[:, :, 2] = second >> 4
        error.copy_(rows)
        error.scatter_(1, places, kept.sub_(rounded.mul_(scales)))

    def _decode(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        rows.zero_()
        self._add(parts, rows)

    def _add(self, parts: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        scales, numbers, packed = parts
        bytes_ = packed.to(torch.int64)
        first = bytes_[:, :, 0] | ((bytes_[:, :, 1] & 15) << 8)
        second = (bytes_[:, :, 1] >> 4) | (bytes_[:, :, 2] << 4)
        places = torch.stack((first, second), dim=2).view(-1, KEPT)
        rows.scatter_add_(1, places, numbers.to(torch.float32).mul_(scales))  # no place comes twice

    def _read(self, parts: Sequence[torch.Tensor], work: torch.Tensor) -> None:
        self._decode(parts, work)


def codec(scheme: str) -> Codec:
    """Of a scheme other than "none"."""
    found: dict[str, type[Codec]] = {"bf16": Bf16, "int8": Int8, "int4": Int4, "topk": TopK}
    return found[scheme]()


def _sane(rows: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The rows, or a copy of them in which everything can be written. ``low``, ``high``: bounds, NaN if any is."""
    if bool(low >= -LARGEST) and bool(high <= LARGEST):
        return rows
    return torch.nan_to_num(rows, nan=0.0).clamp_(-LARGEST, LARGEST)


def _scale(greatest: torch.Tensor, steps: int) -> torch.Tensor:
    """``greatest`` magnitudes become scales, in place; returns what to multiply by."""
    torch.nan_to_num(greatest, nan=LARGEST, out=greatest)
    greatest.clamp_max_(LARGEST).div_(steps)
    greatest.masked_fill_(greatest < LEAST_SCALE, 0.0)
    return greatest.reciprocal().masked_fill_(greatest == 0.0, 0.0)
