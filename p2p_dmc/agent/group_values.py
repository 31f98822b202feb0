"""Rendezvous values of a view's group, between the members' agents (DESIGN.md section 7).

Each member keeps its own values; they are pushed to the others when they are published and asked for again when they
are missed. Only members of the view are told, and only what members say is passed on to the trainer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from p2p_dmc.agent.services import Services
from p2p_dmc.core.agreement_messages import View
from p2p_dmc.wire.messages import GroupValue, GroupValueRequest
from p2p_dmc.wire.trainer_messages import StoreGet, StoreSet, StoreValue

MAX_VALUES = 4096
MAX_VALUE_BYTES = 1 << 16


def _owner(view: View, key: str) -> str | None:
    """The member whose rank the key ends in, if there is one."""
    rank = key.rsplit("/", 1)[-1]
    number = int(rank) if re.fullmatch("[0-9]{1,6}", rank) else len(view.members)
    return view.members[number].peer_id if number < len(view.members) else None


class GroupValues:
    """The values of the views that this peer knows of, bounded; older views' values fall out first."""

    def __init__(self, run: str, services: Services) -> None:
        self._run = run
        self._services = services
        self._values: OrderedDict[tuple[bytes, str], tuple[str, bytes]] = OrderedDict()
        self._view: View | None = None

    def view_changed(self, view: View) -> None:
        self._view = view

    def flush(self, to_trainer: Callable[[object], None]) -> None:
        """The trainer has been told of the view: pass on what came before."""
        for (view_id, key), (owner, value) in list(self._values.items()):
            if self._view is not None and view_id == self._view.view_id and self._owns(owner, key):
                to_trainer(StoreValue(view_id=view_id, key=key, value=value))

    def _owns(self, peer_id: str, key: str) -> bool:
        """Whether the key's rank is this peer's: a stranger's bytes never reach gloo."""
        return self._view is not None and _owner(self._view, key) == peer_id

    def _keep(self, view_id: bytes, key: str, owner: str, value: bytes) -> bool:
        """Whether it was kept: not in place of what the key's owner has said."""
        if len(value) > MAX_VALUE_BYTES or len(key) > 256 or len(view_id) != 16:
            return False
        said_by = self._values.get((view_id, key), (owner, b""))[0]
        current = self._view is not None and view_id == self._view.view_id
        if said_by != owner and current and self._owns(said_by, key):
            return False
        self._values[(view_id, key)] = (owner, value)
        while len(self._values) > MAX_VALUES:
            self._values.popitem(last=False)
        return True

    def publish(self, view: View, me: str, said: StoreSet) -> None:
        """This peer's trainer publishes a value."""
        if said.view_id == view.view_id and self._keep(said.view_id, said.key, me, said.value):
            value = GroupValue(view_id=said.view_id, key=said.key, value=said.value)
            for member in view.members:
                if member.peer_id != me:
                    self._services.send(member.peer_id, value, self._run)

    def want(self, view: View, wanted: StoreGet, to_trainer: Callable[[object], None]) -> None:
        """This peer's trainer misses a value: it is here, or its owner (the key ends in its rank) is asked again."""
        owner, value = self._values.get((wanted.view_id, wanted.key), ("", b""))
        if wanted.view_id == view.view_id and self._owns(owner, wanted.key):
            to_trainer(StoreValue(view_id=wanted.view_id, key=wanted.key, value=value))
            return
        asked = _owner(view, wanted.key)
        if wanted.view_id == view.view_id and asked is not None:
            request = GroupValueRequest(view_id=wanted.view_id, key=wanted.key)
            self._services.send(asked, request, self._run)

    def arrived(self, sender: str, value: GroupValue, to_trainer: Callable[[object], None]) -> None:
        """A value of another member. It may come before this peer has installed the view: then it is kept."""
        kept = self._keep(value.view_id, value.key, sender, value.value)
        if (
            kept
            and self._view is not None
            and value.view_id == self._view.view_id
            and self._owns(sender, value.key)
        ):
            to_trainer(StoreValue(view_id=value.view_id, key=value.key, value=value.value))

    def asked(self, sender: str, request: GroupValueRequest) -> None:
        """Another peer misses a value of mine; only members of the view are told."""
        owner, value = self._values.get((request.view_id, request.key), ("", b""))
        view = self._view
        if owner != self._services.peer_id or view is None or view.view_id != request.view_id:
            return
        if any(m.peer_id == sender for m in view.members):
            answer = GroupValue(view_id=request.view_id, key=request.key, value=value)
            self._services.send(sender, answer, self._run)
