"""The codec, whole: every kind there and back, byte by byte, with junk, with wrong types, and fuzzed."""

from __future__ import annotations

import random
import tracemalloc
import typing
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p_dmc.agent.state import StateHead, decode_head
from p2p_dmc.agent.work import (
    ProposalPayload,
    Strike,
    StrikeList,
    decode_payload,
    decode_strikes,
    encode_payload,
    encode_strikes,
)
from p2p_dmc.core.adacomm import TauPolicy, TauState, start
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import ClientRequest, PeerMeta, decode_meta, encode_meta
from tests.agent.helpers import run_meta
from tests.wire.values import admits, any_of, kinds

SOME = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
KINDS = kinds()


@cache
def examples(name: str) -> tuple[Any, ...]:
    """The same few messages of a kind at every call, long and short."""
    found: list[Any] = []

    @settings(
        max_examples=6,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(any_of(KINDS[name]))
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return tuple(found)


def test_all_kinds_are_known() -> None:
    """The cores', the agents', the trainer's: somebody who forgets to register one finds out here."""
    assert len(KINDS) > 50
    assert {"Ping", "Propose", "RoundHeader", "Lease", "Envelope", "BulkReply", "SubmitScript"} <= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
@SOME
@given(data=st.data())
def test_there_and_back(name: str, data: st.DataObject) -> None:
    value = data.draw(any_of(KINDS[name]))
    packed = codec.encode(value)
    again = codec.decode(packed)
    assert type(again) is KINDS[name] and again == value
    assert codec.encode(again) == packed
    assert codec.decode(memoryview(packed)) == value
    for field in fields(again):  # equality of an IntEnum and an int, or of True and 1, hides a wrong type
        assert type(getattr(again, field.name)) is type(getattr(value, field.name)), field.name


@pytest.mark.parametrize("name", KINDS)
def test_every_cut_and_every_trailing_byte_is_refused(name: str) -> None:
    packed = codec.encode(max(examples(name), key=lambda value: len(codec.encode(value))))
    for end in range(len(packed)):
        with pytest.raises(RemoteProtocolError):
            codec.decode(packed[:end])
    for junk in (b"\xc0", b"\x00", b"\xff", packed):
        with pytest.raises(RemoteProtocolError):
            codec.decode(packed + junk)


WRONG: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**63, 2**64 - 1, 1.5, "", "x", b"", b"x", b"x" * 16, [], [0], [[]],
    [None], ["a", "b"], [1, 2], [1, 2, 3], {},
)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_field_of_another_type_is_refused(name: str) -> None:
    """Each field replaced by every sort of value: taken exactly when the annotation, read by hand, admits it."""
    cls = KINDS[name]
    hints = typing.get_type_hints(cls)
    plain = codec.to_plain(examples(name)[0])
    refused = 0
    for i, field in enumerate(fields(cls)):
        for wrong in WRONG:
            packed = msgpack.packb([codec.PROTOCOL, name, [*plain[:i], wrong, *plain[i + 1 :]]])
            if not admits(hints[field.name], wrong):
                refused += 1
                with pytest.raises(RemoteProtocolError):
                    codec.decode(packed)
            elif not hasattr(cls, "__post_init__"):
                taken = codec.to_plain(codec.decode(packed))[i]
                assert taken == (float(wrong) if hints[field.name] is float else wrong)
    assert refused >= 10 * len(plain)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_or_an_extra_field_is_refused(name: str) -> None:
    plain = codec.to_plain(examples(name)[0])
    bodies: list[Any] = [[*plain, None], [*plain, 0], [plain], None, 7, "", dict.fromkeys(range(len(plain)))]
    bodies += [plain[:i] + plain[i + 1 :] for i in range(len(plain))]
    for body in bodies:
        with pytest.raises(RemoteProtocolError):
            codec.decode(msgpack.packb([codec.PROTOCOL, name, body]))


def test_what_is_not_a_message_is_refused() -> None:
    body = codec.to_plain(ClientRequest(command="status", arguments=()))
    whole = [codec.PROTOCOL, "ClientRequest", body]
    assert codec.decode(msgpack.packb(whole)).command == "status"
    for other in (
        whole[:2],
        [*whole, 0],
        [codec.PROTOCOL + 1, *whole[1:]],
        [True, *whole[1:]],
        [str(codec.PROTOCOL), *whole[1:]],
        [codec.PROTOCOL, "Unheard", body],
        [codec.PROTOCOL, b"ClientRequest", body],
        [codec.PROTOCOL, ["ClientRequest"], body],
        [codec.PROTOCOL, "RunMeta", []],  # a dataclass of ours, but no message
        [codec.PROTOCOL, "object", []],
        {"a": 1},
        None,
    ):
        with pytest.raises(RemoteProtocolError):
            codec.decode(msgpack.packb(other))
    for raw in (
        b"",
        b"\xc1",
        b"\xd4\x01\x00",
        b"\xa2\xff\xfe",
        msgpack.packb(msgpack.Timestamp(1)),
        b"\x91" * 5000,
    ):
        with pytest.raises(RemoteProtocolError):
            codec.decode(raw)


def test_a_value_that_its_class_refuses_is_the_peers_fault() -> None:
    for body in (
        [1, 1, "", b"short", 0, 0, 1],
        [1, 1, "", b"d" * 16, 0, -1, 1],
        [1, 1, "", b"d" * 16, 0, 0, 0],
    ):
        with pytest.raises(RemoteProtocolError, match="BulkRequest: no such range"):
            codec.decode(msgpack.packb([codec.PROTOCOL, "BulkRequest", body]))


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_too_large_is_refused_on_both_sides() -> None:
    fits = ClientRequest(command="x" * (codec.MAX_MESSAGE_BYTES - 100), arguments=())
    assert codec.decode(codec.encode(fits)) == fits
    with pytest.raises(ValueError, match="more than"):
        codec.encode(ClientRequest(command="x" * codec.MAX_MESSAGE_BYTES, arguments=()))
    packed = msgpack.packb([codec.PROTOCOL, "ClientRequest", ["x" * codec.MAX_MESSAGE_BYTES, []]])
    with pytest.raises(RemoteProtocolError, match="the limit is"):
        codec.decode(packed)
    with pytest.raises(RemoteProtocolError, match="the limit is 10"):
        codec.unpack_value(PeerMeta, b"\xc0" * 11, 10)


def test_a_small_message_cannot_announce_large_arrays() -> None:
    """Each of these nested headers announces a million items; nothing of the sort is set aside."""
    bomb = b"\xdd\x00\x0f\xff\xff" * 200
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            codec.decode(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -- registration -----------------------------------------------------------------------------------------------------


def test_only_registered_dataclasses_are_messages() -> None:
    with pytest.raises(TypeError, match="not a registered message"):
        codec.encode(Stretch(shard=0, lo=0, hi=1))
    with pytest.raises(TypeError, match="not a dataclass"):
        codec.message(int)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Ping:
        x: int

    with pytest.raises(TypeError, match="two message classes are named Ping"):
        codec.message(Ping)
    with pytest.raises(TypeError, match="not a registered message"):
        codec.encode(Ping(x=1))


@pytest.mark.parametrize("hint", [dict[str, int], list[int], set[int], int | str, int | str | None, object])
def test_an_annotation_without_a_wire_form_is_our_own_bug(hint: Any) -> None:
    with pytest.raises(TypeError):
        codec._decoder(hint)


class Colour(IntEnum):
    RED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    pair: tuple[int, str]
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner | None
    many: tuple[Inner, ...]
    real: float


def test_what_the_plain_form_looks_like() -> None:
    """The format itself, so that a change of it is seen."""
    inner = Inner(pair=(1, "a"), colour=Colour.RED)
    value = Outer(inner=inner, many=(inner, inner), real=0.5)
    one = [[1, "a"], 1]
    assert codec.to_plain(value) == [one, [one, one], 0.5]
    assert codec.from_plain(Outer, [None, [], 2]) == Outer(inner=None, many=(), real=2.0)
    assert type(codec.from_plain(Outer, [None, [], 2]).real) is float
    assert msgpack.unpackb(codec.encode(ClientRequest(command="a", arguments=("b",)))) == [
        6, "ClientRequest", ["a", ["b"]],
    ]  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="Outer: Inner: no Colour is 2"):
        codec.from_plain(Outer, [[[1, "a"], 2], [], 0.5])


# -- fuzz -------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode(data)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to three bytes changed, inserted, cut out or doubled."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 1:
            changed.insert(
                at, rng.choice((0x00, 0x90, 0xA0, 0xC0, 0xC4, 0xCF, 0xDD, 0xFF, rng.randrange(256)))
            )
        elif how == 2:
            del changed[at : at + rng.randint(1, 4)]
        else:
            changed[at:at] = changed[at : at + rng.randint(1, 8)]
    return bytes(changed)


def test_mutated_messages_raise_nothing_else() -> None:
    rng = random.Random(7)
    packed = [codec.encode(value) for name in KINDS for value in examples(name)]
    taken = 0
    for _ in range(6000):
        try:
            value = codec.decode(mutated(rng.choice(packed), rng))
        except RemoteProtocolError:
            continue
        taken += 1
        assert codec.encode(codec.decode(codec.encode(value))) == codec.encode(value)
    assert 100 < taken < 5900  # both outcomes were tried


def inner_values() -> list[tuple[Any, bytes]]:
    """What travels inside messages, with its reader."""
    strike = Strike(victim="a:1", view_epoch=2, death=1, epoch=0, stretches=((0, 0, 5), (1, 2, 3)))
    run = run_meta(history=b"h" * 16, view_epoch=3, samples=9, quorum="majority")
    payload = ProposalPayload(
        view_epoch=1,
        epoch=0,
        part=1,
        claims=(((0, 0, 5), (3, 2, 7)),),
        holdings=b"\xff",
        reachable=b"\xff",
        speed=3,
        full=False,
        strikes=(strike,),
    )
    policy = TauPolicy(kind="adacomm", tau0=4)
    ledger = Ledger.start(b"d" * 16, [10, 0, 7], 3, 2).advance([Stretch(shard=0, lo=2, hi=9)])
    ledger = ledger.strike(Stretch(shard=2, lo=1, hi=4)).skip([Stretch(shard=2, lo=5, hi=6)])
    head = StateHead(
        anchor_digest=b"a" * 16, anchor_bytes=4, ledger=ledger.to_bytes(), tau=start(policy).to_bytes()
    )
    return [
        (decode_meta, encode_meta(PeerMeta(weight=5, runs=(run,)))),
        (decode_payload, encode_payload(payload)),
        (decode_strikes, encode_strikes([strike, strike])),
        (lambda data: decode_head(data, b"x" * 16), codec.pack_value(head)),
        (Ledger.from_bytes, ledger.to_bytes()),
        (TauPolicy.from_bytes, policy.to_bytes()),
        (TauState.from_bytes, start(policy).to_bytes()),
    ]


def test_mutated_values_inside_messages_raise_nothing_else() -> None:
    rng = random.Random(11)
    for read, packed in inner_values():
        for _ in range(1500):
            try:
                read(mutated(packed, rng))
            except RemoteProtocolError:
                continue


def test_values_inside_messages_there_and_back() -> None:
    meta, payload, strikes, head, ledger, policy, state = inner_values()
    told = decode_meta(meta[1])
    assert told is not None and encode_meta(told) == meta[1] and told.runs[0].quorum == "majority"
    assert encode_payload(decode_payload(payload[1])) == payload[1]
    assert encode_strikes(decode_strikes(strikes[1])) == strikes[1] and len(decode_strikes(strikes[1])) == 2
    for read, packed in (ledger, policy, state):
        assert read(packed).to_bytes() == packed
    with pytest.raises(RemoteProtocolError, match="does not have the digest"):
        head[0](head[1])
    assert decode_meta(b"junk") is None
    assert (
        decode_meta(codec.pack_value(PeerMeta(weight=1, runs=told.runs * 60))) is None
    )  # more than 2048 bytes
    assert codec.unpack_value(StrikeList, strikes[1], 1 << 20).strikes == decode_strikes(strikes[1])
