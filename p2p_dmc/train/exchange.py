"""Messages between the members of a view's group, each to one other member."""

from __future__ import annotations

from typing import Any

import torch


class CollectiveError(Exception):
    """The group could not be made, or what it did failed or was cancelled. The message is for the log."""


class Message:
    """One that is under way, out or in. Its memory is gloo's until it is done."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Until it is done; CollectiveError when the group breaks, or its time-out passes."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(first_line(error)) from None


class Exchange:
    """What one member sends and receives. Messages between two members with one ``tag`` arrive in their order.

    Both ends must mean the same size: another ends gloo's process. gloo's time-out bounds how long one wait lasts, so
    long payloads go in pieces. ``sent_bytes`` and ``received_bytes`` count what was asked for.
    """

    def __init__(self, group: Any, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.sent_bytes = self.received_bytes = 0
        self._group = group

    @property
    def others(self) -> list[int]:
        """Ranks after this one, in ring order: everybody has another one first."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def send(self, payload: torch.Tensor, to: int, tag: int) -> Message:
        """Begin to send; the payload must not change until it is done."""
        self.sent_bytes += payload.nbytes
        return self._begin(self._group.send, payload, to, tag)

    def receive(self, payload: torch.Tensor, sender: int, tag: int) -> Message:
        """Begin to receive."""
        self.received_bytes += payload.nbytes
        return self._begin(self._group.recv, payload, sender, tag)

    def _begin(self, operation: Any, payload: torch.Tensor, other: int, tag: int) -> Message:
        try:
            return Message(operation([payload], other, tag))
        except RuntimeError as error:
            raise CollectiveError(first_line(error)) from None


def first_line(error: Exception) -> str:
    """For the log."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
