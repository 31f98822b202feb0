"""Parameters as one flat float32 vector, and the slot files of shared memory in which anchors live.

Every operation on an anchor rounds separately, element by element (no fused multiply-add, no ``alpha=``), so
that peers with different processors get the same bits (DESIGN.md section 7).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from p2p_dmc.errors import UserError
from p2p_dmc.train.names import STATISTICS
from p2p_dmc.wire.trainer_messages import ParameterSpec

ITEM_BYTES = 4
MAPPED_SLOTS = 8
"""More than an agent has: the anchor, two recent states, the candidate, one that is being adopted."""


class FlatParameters:
    """The order and shapes of a model's parameters in a flat float32 vector of ``size`` elements.

    A parameter that is tied (the same object twice) counts once. Any real floating dtype goes in and comes
    out.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(named)}
        self._named = [unique.pop(id(p)) for _, p in named if id(p) in unique]
        for name, parameter in self._named:
            if not parameter.is_floating_point():
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UserError(
                    f"parameter {name} is {dtype}: only floating dtypes can be averaged, leave it out"
                )
        self.size = sum(parameter.numel() for _, parameter in self._named)
        self.statistics = sum(
            tensor.numel()
            for name, tensor in self._named
            if name.rpartition(".")[2] in STATISTICS and not isinstance(tensor, torch.nn.Parameter)
        )
        """Elements at the end that are running statistics, not parameters."""
        if self.size == 0:
            raise UserError("the optimizer has no parameters: give it model.parameters()")

    @property
    def specs(self) -> tuple[ParameterSpec, ...]:
        """Names, shapes and dtypes, in order."""
        return tuple(
            ParameterSpec(name=name, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."))
            for name, p in self._named
        )

    def gather(self, flat: torch.Tensor) -> None:
        """Copy the parameters into ``flat`` (float32, on the CPU, ``size`` elements)."""
        offset = 0
        for _, parameter in self._named:
            count = parameter.numel()
            flat[offset : offset + count].view(parameter.shape).copy_(parameter.detach())
            offset += count

    def scatter(self, flat: torch.Tensor) -> None:
        """Copy ``flat`` into the parameters."""
        offset = 0
        with torch.no_grad():
            for _, parameter in self._named:
                count = parameter.numel()
                parameter.copy_(flat[offset : offset + count].view(parameter.shape))
                offset += count

    def add_residue(self, anchor: torch.Tensor, flat: torch.Tensor) -> None:
        """Add to ``flat``, gathered, what ``scatter(anchor)`` could not put into parameters of fewer bits: what they
        would be had they started from the anchor itself. Else each round would round the average once more, and what
        is less than half their last bit would never come through.
        """
        offset = 0
        for _, parameter in self._named:
            count = parameter.numel()
            if torch.finfo(parameter.dtype).bits < 32:
                exact = anchor[offset : offset + count]
                flat[offset : offset + count].add_(exact - exact.to(parameter.dtype).float())
            offset += count

    def has_overflow(self) -> bool:
        """Whether a gradient is not finite."""
        return any(p.grad is not None and not _is_finite(p.grad) for _, p in self._named)

    def clear_gradients(self) -> None:
        """Zero what has been accumulated (in place: the script may hold the tensors)."""
        for _, parameter in self._named:
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()


def open_slot(path: str, size: int) -> torch.Tensor:
    """The slot file at ``path`` as a float32 vector of ``size`` elements, shared with whoever maps it.

    A file of another length is brought to the right one first, its blocks reserved: writing to a full memory
    file system through a map would kill the process.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags, 0o600)
    try:
        if os.fstat(fd).st_size != size * ITEM_BYTES:
            os.ftruncate(fd, size * ITEM_BYTES)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size * ITEM_BYTES)
        found = os.fstat(fd)
    finally:
        os.close(fd)
    return _map(path, size, found.st_dev, found.st_ino)


@functools.lru_cache(maxsize=MAPPED_SLOTS)
def _map(path: str, size: int, device: int, inode: int) -> torch.Tensor:
    """A run's few slots come again and again: mapped once, their pages are not faulted in anew in every round."""
    return torch.from_numpy(np.memmap(path, dtype="<f4", mode="r+", shape=(size,)))


def forget_slots() -> None:
    """Unmap the slots that nobody holds: the agent gives their memory back."""
    _map.cache_clear()


def read_slot(path: str, size: int, digest: bytes) -> torch.Tensor:
    """The slot's vector after checking its digest."""
    if not os.path.exists(path):
        raise RuntimeError(f"the anchor's slot {path} does not exist")
    slot = open_slot(path, size)
    if digest_of(slot) != digest:
        raise RuntimeError(f"the anchor in {path} has digest {digest_of(slot).hex()}, not {digest.hex()}")
    return slot


def digest_of(slot: torch.Tensor) -> bytes:
    """xxh3_128 of the vector's bytes."""
    return bytes(xxhash.xxh3_128(slot.numpy().data).digest())


def all_finite(vector: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. Without a temporary of the vector's length, in one pass as a rule."""
    if bool(torch.isfinite(torch.dot(vector, vector))):
        return True  # one element that is not finite would have made the sum so
    low, high = torch.aminmax(vector)  # or it was only too large
    return bool(torch.isfinite(low) & torch.isfinite(high))


def weighted_delta(anchor: torch.Tensor, local: torch.Tensor, weight: int) -> None:
    """``local`` becomes weight x (anchor - local), in place."""
    torch.sub(anchor, local, out=local)
    local.mul_(float(weight))


def average(anchor: torch.Tensor, reduced: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    """``out`` becomes anchor - reduced / divisor; ``reduced`` is used up. A divisor of zero means no weight
    at all.
    """
    if divisor == 0:
        out.copy_(anchor)
        return
    reduced.div_(float(divisor))
    torch.sub(anchor, reduced, out=out)


def mean(reduced: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    """``out`` becomes reduced / divisor: what ``average`` subtracts from the anchor."""
    torch.div(reduced, float(divisor), out=out)


def forget_nonfinite(state: dict[Any, Any]) -> int:
    """Drop an inner optimizer's memory of every parameter for which it holds NaN or infinity; how many there
    were.

    Without this one bad batch would poison a momentum for good, and its owner would never have weight again.
    """
    bad = [
        key
        for key, values in state.items()
        if isinstance(values, dict)
        and any(torch.is_tensor(v) and v.is_floating_point() and not _is_finite(v) for v in values.values())
    ]
    for key in bad:
        del state[key]
    return len(bad)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Of a sparse one, what it has."""
    dense = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor
    return bool(torch.isfinite(dense).all())
