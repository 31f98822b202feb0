"""Fetching a state from the members that hold it: striped, verified, another donor for one that fails (DESIGN.md 8)."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Sequence

from p2p_dmc.agent.bulk import BulkClient, SourceLostError
from p2p_dmc.agent.state import Held, SlotPool, decode_head, file_digest
from p2p_dmc.core.agreement_messages import StateRef
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.messages import BulkKind

HEAD, ANCHOR = 0, 1  # parts of a state
RETRY_S = 0.3
WINDOW = 4
"""Ranges asked of a donor at once: they fill a cable whose queue holds a twentieth of a second."""


class AdoptionFailedError(Exception):
    """No donor could give the state; the next view will name others."""


class Adoption:
    """Downloads one state into a slot. ``donors``: addresses, asked anew so that late holders help."""

    def __init__(
        self,
        bulk: BulkClient,
        run: str,
        slots: SlotPool,
        chunk_bytes: int,
        gate: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._bulk = bulk
        self._run = run
        self._slots = slots
        self._chunk = chunk_bytes
        self._gate = gate
        """Awaited before each range of the anchor, with its size in bytes: whoever yields to others waits there."""

    async def fetch(self, ref: StateRef, donors: Callable[[], Sequence[str]], give_up_s: float) -> Held:
        """The state with this digest, verified; AdoptionFailedError after ``give_up_s`` without success.

        When somebody has lied, not before each donor was asked alone.
        """
        deadline = asyncio.get_running_loop().time() + give_up_s
        problem, attempts, lied, owed = "nobody holds it", 0, False, 0
        while owed > 0 or asyncio.get_running_loop().time() < deadline:
            addresses = list(donors())
            first = attempts % max(1, len(addresses))
            ring = addresses[first:] + addresses[:first]  # another one first, each time
            attempts += 1
            owed -= 1
            try:
                if addresses:
                    return await self._attempt(ref, ring[:1] if lied else ring)
            except SourceLostError as error:
                problem = str(error)
            except RemoteProtocolError as error:
                problem = str(error)
                if not lied:  # of several it does not show which: each one alone, even when that takes long
                    lied, owed = True, len(ring)
            await asyncio.sleep(RETRY_S)
        raise AdoptionFailedError(f"state {ref.lineage} could not be fetched: {problem}")

    async def _whole(self, address: str, digest: bytes, part: int) -> bytes:
        total, data = await self._range(address, digest, part, 0)
        if not 0 <= total <= 64 << 20:
            raise RemoteProtocolError(f"{address} says the state's head has {total} bytes")
        parts = [bytes(data)]
        while (offset := sum(map(len, parts))) < total:
            whole, data = await self._range(address, digest, part, offset)
            if whole != total:
                raise RemoteProtocolError(f"{address} changed its mind about the size of the state's head")
            parts.append(bytes(data))
        return b"".join(parts)

    async def _range(self, address: str, digest: bytes, part: int, offset: int) -> tuple[int, memoryview]:
        return await self._bulk.fetch(
            address, BulkKind.STATE, name=self._run, digest=digest, part=part, offset=offset, size=self._chunk
        )

    async def _attempt(self, ref: StateRef, addresses: list[str]) -> Held:
        head, ledger, tau = decode_head(await self._whole(addresses[0], ref.digest, HEAD), ref.digest)
        if head.anchor_bytes != self._slots.size_bytes:
            raise RemoteProtocolError(
                f"an anchor of {head.anchor_bytes} bytes, {self._slots.size_bytes} here"
            )
        slot = self._slots.take()
        try:
            with open(slot, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                await self._stripes(ref.digest, head.anchor_bytes, addresses, memory)
            digest = await asyncio.to_thread(file_digest, slot)
            if digest != head.anchor_digest:
                raise RemoteProtocolError("the anchor that was received has another digest")
        except (SourceLostError, RemoteProtocolError, OSError, asyncio.CancelledError):
            self._slots.unpin(slot)
            raise
        return Held(ref=ref, slot=slot, anchor_digest=head.anchor_digest, ledger=ledger, tau=tau)

    async def _stripes(self, digest: bytes, total: int, addresses: list[str], memory: mmap.mmap) -> None:
        """Every donor serves what is left, chunk by chunk; a donor that fails leaves the rest to the others."""
        offsets = list(range(0, total, self._chunk))[::-1]
        problems: dict[str, str] = {}

        async def donor(address: str) -> None:
            while offsets:
                if self._gate is not None:
                    await self._gate(self._chunk)
                if not offsets:
                    return
                offset = offsets.pop()
                try:
                    whole, data = await self._range(address, digest, ANCHOR, offset)
                    if whole != total:
                        raise SourceLostError(f"{address} has an anchor of {whole} bytes")
                except SourceLostError as error:
                    offsets.append(offset)
                    problems[address] = str(error)
                    return
                memory[offset : offset + len(data)] = data
                reach("adopting")

        while offsets:  # again when one was lost after the others had finished
            able = [a for a in addresses if a not in problems]
            if not able:
                raise SourceLostError("; ".join(problems.values()))
            await asyncio.gather(*(donor(a) for _ in range(WINDOW) for a in able))
