"""The collective of one round: it may end well on any of its members before it fails on the others."""

from __future__ import annotations

from collections.abc import Callable

from p2p_dmc.core.agreement_messages import MemberId, StateRef, View
from tests.sim.model import Pieces


class Collective:
    """One reduction. Who has posted its delta waits for the result; once the data has flowed anybody may get it."""

    __slots__ = ("contributions", "done", "round", "states", "view")

    def __init__(self, view: View, number: int) -> None:
        self.view = view
        self.round = number
        self.contributions: dict[MemberId, Pieces] = {}
        """What each member's delta is truly made of: its trainer's samples."""
        self.states: dict[MemberId, StateRef] = {}
        """What each started from."""
        self.done = False

    def post(self, member: MemberId, state: StateRef, delta: Pieces) -> None:
        self.contributions[member] = delta
        self.states[member] = state

    def flow(self, connected: Callable[[list[str]], bool]) -> bool:
        """Whether the result is there: each member posted, and then all were connected for a moment."""
        if not self.done and len(self.contributions) == len(self.view.members):
            self.done = connected([member.peer_id for member in self.contributions])
        return self.done

    @property
    def divisor(self) -> int:
        """The sum of the weights that are in the average."""
        return sum(len(stretch) for pieces in self.contributions.values() for stretch in pieces)
