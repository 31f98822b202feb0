"""Any message at all, drawn from its annotations; and which plain values an annotation admits, by hand."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from hypothesis import strategies as st

from p2p_dmc.core.agreement_messages import (
    MemberId,
    Propose,
    Replaced,
    StateRef,
    Stopped,
    ViewRef,
    Withdrawal,
)
from p2p_dmc.core.membership_messages import MemberRecord, MemberState, Role
from p2p_dmc.wire import codec, messages, trainer_messages, transport
from p2p_dmc.wire.messages import BulkRequest

MODULES = (messages, trainer_messages, transport)  # importing them registers every kind there is
PEER_IDS = st.text(alphabet="0123456789abcdef", min_size=32, max_size=32)
ADDRESSES = st.sampled_from(["tcp://10.0.0.1:7400", "tcp://[fe80::1]:65535", "tcp://host.example:1"])
DIGESTS = st.binary(min_size=16, max_size=16)
COUNTS = st.integers(0, 2**62)
INTEGERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 300))
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "peer_id": PEER_IDS,
    "address": ADDRESSES,
    "bulk_address": ADDRESSES,
    "digest": DIGESTS,
    "history": st.one_of(st.just(b""), DIGESTS),
    "courted": st.one_of(st.just(b""), DIGESTS),
    "minted": st.one_of(st.just(b""), DIGESTS),
    "timeout_ms": st.integers(1, 600_000),
    "promised": st.dictionaries(st.text(max_size=20), COUNTS, max_size=3).map(
        lambda versions: tuple(sorted(versions.items()))
    ),
}
"""Fields of the cores' messages that are checked when they are built."""


def kinds() -> dict[str, type]:
    """Every message of the program by its name on the wire."""
    return {n: c for n, c in sorted(codec._kinds.items()) if c.__module__.startswith("p2p_dmc.")}


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    if is_dataclass(hint):
        cls = typing.cast(type, hint)
        return SPECIAL[cls]() if cls in SPECIAL else st.builds(cls, **_fields_of(cls))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[st.none() if arg is type(None) else any_of(arg) for arg in args])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(any_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(any_of, args))
    if issubclass(hint, enum.IntEnum):
        return st.sampled_from(list(hint))
    return {
        int: INTEGERS,
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }[hint]


def _fields_of(cls: type, **given: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    core = cls.__module__.startswith("p2p_dmc.core.")
    hints = typing.get_type_hints(cls)
    found = {}
    for field in fields(cls):
        hint = hints[field.name]
        if field.name in given:
            found[field.name] = given[field.name]
        elif core and field.name in BY_NAME:
            found[field.name] = BY_NAME[field.name]
        else:
            found[field.name] = COUNTS if core and hint is int else any_of(hint)
    return found


def _view_refs() -> st.SearchStrategy[ViewRef]:
    members = st.lists(any_of(MemberId), min_size=1, max_size=3, unique_by=lambda m: m.peer_id)
    return st.builds(
        ViewRef,
        view_epoch=st.integers(1, 2**62),
        members=members.map(lambda ms: tuple(sorted(ms, key=lambda m: m.peer_id))),
    )


def _proposals() -> st.SearchStrategy[Propose]:
    @st.composite
    def draw_one(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Propose:
        sender = draw(any_of(MemberId))
        others = draw(st.lists(PEER_IDS, max_size=3, unique=True))
        candidates = tuple(sorted({sender.peer_id, *others}))
        stopped = tuple(p for p in candidates if p != sender.peer_id and draw(st.booleans()))
        voters = tuple(p for p in candidates if draw(st.booleans()))
        given = {
            "sender": st.just(sender),
            "candidates": st.just(candidates),
            "stopped": st.just(stopped),
            "voters": st.just(voters),
            "evicted": st.lists(PEER_IDS, max_size=3, unique=True).map(lambda ids: tuple(sorted(ids))),
        }
        return Propose(**{name: draw(value) for name, value in _fields_of(Propose, **given).items()})

    return draw_one()


def _records() -> st.SearchStrategy[MemberRecord]:
    @st.composite
    def draw_one(draw: Callable[[st.SearchStrategy[Any]], Any]) -> MemberRecord:
        state = draw(st.sampled_from(MemberState))
        accusers = draw(st.lists(PEER_IDS, max_size=3, unique=True)) if state is MemberState.SUSPECT else []
        given = {
            "state": st.just(state),
            "role": st.sampled_from(Role),
            "accusers": st.just(tuple(sorted(accusers))),
            "attested": st.booleans() if state is MemberState.DEAD else st.just(False),
        }
        return MemberRecord(
            **{name: draw(value) for name, value in _fields_of(MemberRecord, **given).items()}
        )

    return draw_one()


SPECIAL: dict[type, Callable[[], st.SearchStrategy[Any]]] = {
    ViewRef: _view_refs,
    Propose: _proposals,
    MemberRecord: _records,
    StateRef: lambda: st.builds(StateRef, lineage=st.tuples(COUNTS, COUNTS), digest=DIGESTS),
    Replaced: lambda: st.builds(
        Replaced, history=DIGESTS, lineage=st.tuples(COUNTS, COUNTS), evicted=st.booleans()
    ),
    Withdrawal: lambda: st.builds(
        Withdrawal,
        **_fields_of(Withdrawal, stopped=st.builds(Stopped, **_fields_of(Stopped, withdrawn=st.just(True)))),
    ),
    BulkRequest: lambda: st.builds(
        BulkRequest,
        **_fields_of(
            BulkRequest,
            digest=DIGESTS,
            part=st.integers(0, 2**20),
            offset=st.integers(0, 2**40),
            size=st.integers(1, 4 << 20),
        ),
    ),
}


def admits(hint: Any, plain: Any) -> bool:
    """Whether a plain msgpack value has the shape of the annotation. Shares no code with the codec."""
    if is_dataclass(hint):
        hints = typing.get_type_hints(typing.cast(type, hint))
        return (
            type(plain) is list
            and len(plain) == len(fields(hint))
            and all(admits(hints[f.name], p) for f, p in zip(fields(hint), plain, strict=True))
        )
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(plain is None if arg is type(None) else admits(arg, plain) for arg in args)
    if origin is tuple and args[-1] is Ellipsis:
        return type(plain) is list and all(admits(args[0], p) for p in plain)
    if origin is tuple:
        return type(plain) is list and len(plain) == len(args) and all(map(admits, args, plain))
    if issubclass(hint, enum.IntEnum):
        return type(plain) is int and plain in [int(one) for one in hint]
    if hint is float:
        return type(plain) in (float, int)  # 1.0 and 1 are one number
    return type(plain) is hint
