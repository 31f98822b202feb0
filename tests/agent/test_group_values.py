"""Rendezvous values: a member's word reaches the trainers of its view, a stranger's never does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import group_values
from p2p_dmc.agent.group_values import GroupValues
from p2p_dmc.core.agreement_messages import View
from p2p_dmc.wire.messages import GroupValue, GroupValueRequest
from p2p_dmc.wire.trainer_messages import StoreGet, StoreSet, StoreValue
from tests.agent.helpers import VIEW_ID, Around, payload, peer, surroundings, view_of

VIEW = view_of([payload()] * 3)
NEXT = replace(VIEW, view_epoch=2, view_id=b"w" * 16)


class Desk:
    """Peer 1 (rank 0) of a view with peers 2 and 3, its trainer's mailbox and its own."""

    def __init__(self, root: Path, view: View | None = VIEW) -> None:
        self.around: Around = surroundings(root, me=1)
        self.values = GroupValues("r", self.around.services)
        self.trainer: list[Any] = []
        if view is not None:
            self.values.view_changed(view)

    def arrives(self, sender: int, key: str, value: bytes = b"x", view_id: bytes = VIEW_ID) -> list[Any]:
        before = len(self.trainer)
        message = GroupValue(view_id=view_id, key=key, value=value)
        self.values.arrived(peer(sender), message, self.trainer.append)
        return self.trainer[before:]

    def asked(self, sender: int, key: str, view_id: bytes = VIEW_ID) -> list[tuple[str, object, str]]:
        before = len(self.around.sent)
        self.values.asked(peer(sender), GroupValueRequest(view_id=view_id, key=key))
        return self.around.sent[before:]

    def publish(self, key: str, value: bytes, view_id: bytes = VIEW_ID) -> None:
        self.values.publish(VIEW, peer(1), StoreSet(view_id=view_id, key=key, value=value))

    def want(self, key: str, view: View = VIEW, view_id: bytes = VIEW_ID) -> tuple[list[Any], list[Any]]:
        trainer, sent = len(self.trainer), len(self.around.sent)
        self.values.want(view, StoreGet(view_id=view_id, key=key), self.trainer.append)
        return self.trainer[trainer:], self.around.sent[sent:]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def told(key: str, value: bytes = b"x", view_id: bytes = VIEW_ID) -> StoreValue:
    return StoreValue(view_id=view_id, key=key, value=value)


def test_what_my_trainer_publishes_is_pushed_to_the_other_members(desk: Desk) -> None:
    desk.publish("g/0", b"mine")
    value = GroupValue(view_id=VIEW_ID, key="g/0", value=b"mine")
    assert desk.around.sent == [(peer(2), value, "r"), (peer(3), value, "r")]
    desk.publish("g/0", b"late", view_id=b"o" * 16)  # of an older view
    assert len(desk.around.sent) == 2
    assert desk.asked(2, "g/0") == [(peer(2), value, "r")]


def test_a_members_value_reaches_my_trainer_at_once_and_again_when_missed(desk: Desk) -> None:
    assert desk.arrives(2, "g/1") == [told("g/1")]
    assert desk.want("g/1") == ([told("g/1")], [])


def test_a_value_that_is_missed_is_asked_of_its_owner(desk: Desk) -> None:
    request = GroupValueRequest(view_id=VIEW_ID, key="g/2")
    assert desk.want("g/2") == ([], [(peer(3), request, "r")])
    assert desk.want("g/7") == desk.want("g") == desk.want("g/x") == ([], [])  # nobody's
    assert desk.want("g/2", view_id=b"o" * 16) == ([], [])


def test_only_the_owner_of_a_key_can_say_it(desk: Desk) -> None:
    """gloo would connect to whatever address stands there."""
    assert desk.arrives(3, "g/1") == []  # a member, for another's rank
    assert desk.arrives(9, "g/1") == []  # no member
    assert desk.arrives(2, "g/9") == desk.arrives(2, "g") == desk.arrives(2, "g/-1") == []
    trainer, sent = desk.want("g/1")
    assert trainer == [] and len(sent) == 1  # still missing
    desk.values.flush(desk.trainer.append)
    assert desk.trainer == []


@pytest.mark.parametrize("rank", ["²", "٣", "①", "9" * 250, "1 ", "", "0x1", "1e0", "+1"])
def test_a_rank_that_only_looks_like_a_number_is_nobodys(desk: Desk, rank: str) -> None:
    assert desk.arrives(2, f"g/{rank}") == []
    assert desk.want(f"g/{rank}") == ([], [])


def test_a_stranger_cannot_put_its_word_in_place_of_a_members(desk: Desk) -> None:
    desk.publish("g/0", b"mine")
    desk.arrives(2, "g/1", b"two's")
    for stranger in (3, 9):
        desk.arrives(stranger, "g/0", b"evil")
        desk.arrives(stranger, "g/1", b"evil")
    assert [m.value for _, m, _ in desk.asked(2, "g/0")] == [b"mine"]  # type: ignore[attr-defined]
    assert desk.want("g/1") == ([told("g/1", b"two's")], [])


def test_only_members_are_answered_and_only_with_my_own(desk: Desk) -> None:
    desk.publish("g/0", b"mine")
    desk.arrives(2, "g/1")
    assert desk.asked(9, "g/0") == []
    assert desk.asked(3, "g/1") == []  # not mine to say
    assert desk.asked(3, "g/5") == []
    assert desk.asked(3, "g/0", view_id=b"o" * 16) == []
    desk.values.view_changed(NEXT)
    assert desk.asked(3, "g/0") == []  # of the view before


def test_what_comes_before_the_view_waits_for_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path, view=None)
    assert desk.arrives(2, "g/1") == desk.arrives(9, "g/2") == []
    assert desk.arrives(3, "g/2", view_id=NEXT.view_id) == []
    desk.values.view_changed(VIEW)
    desk.values.flush(desk.trainer.append)
    assert desk.trainer == [told("g/1")]
    desk.values.view_changed(NEXT)
    desk.values.flush(desk.trainer.append)
    assert desk.trainer[1:] == [told("g/2", view_id=NEXT.view_id)]


def test_values_are_bounded_and_the_oldest_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_values, "MAX_VALUES", 5)
    for i in range(8):
        desk.arrives(2, f"g{i}/1")
    assert len(desk.values._values) == 5
    assert desk.want("g2/1")[0] == [] and desk.want("g3/1")[0] == [told("g3/1")]
    assert desk.arrives(2, "g/1", b"x" * (group_values.MAX_VALUE_BYTES + 1)) == []
    assert desk.arrives(2, "k" * 256 + "/1") == []
    assert desk.arrives(2, "g/1", view_id=b"short") == []
    assert len(desk.values._values) == 5
