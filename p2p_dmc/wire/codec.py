"""Typed msgpack: frozen dataclasses to bytes and back, checked field by field (DESIGN.md invariant 10).

A message is ``[PROTOCOL, kind, fields]`` where ``fields`` is the list of the dataclass's field values in order of
declaration. Decoding follows the annotations: a value of another type, a missing or an extra field, an unknown
kind, trailing bytes or an oversize message is a RemoteProtocolError. Nothing is unpickled, nothing is executed.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import msgpack

from p2p_dmc.errors import RemoteProtocolError

PROTOCOL = 6
MAX_MESSAGE_BYTES = 8 << 20  # control messages; bulk payloads travel as frames of their own
MAX_ITEMS = 1 << 20  # elements of any one array inside a message

T = TypeVar("T")
Decoder = Callable[[Any], Any]
Encoder = Callable[[Any], Any]

_kinds: dict[str, type] = {}
_decoders: dict[Any, Decoder] = {}
_encoders: dict[Any, Encoder] = {}


def message(cls: type[T]) -> type[T]:
    """Register a frozen dataclass as a message; its kind on the wire is its class name."""
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass")
    if cls.__name__ in _kinds and _kinds[cls.__name__] is not cls:
        raise TypeError(f"two message classes are named {cls.__name__}")
    _kinds[cls.__name__] = cls
    return cls


def encode(value: Any) -> bytes:
    """The bytes of a registered message."""
    cls = type(value)
    if _kinds.get(cls.__name__) is not cls:
        raise TypeError(f"{cls.__name__} is not a registered message")
    packed: bytes = msgpack.packb([PROTOCOL, cls.__name__, to_plain(value)], use_bin_type=True)
    if len(packed) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{cls.__name__} is {len(packed)} bytes, more than {MAX_MESSAGE_BYTES}")
    return packed


def decode(data: bytes | memoryview) -> Any:
    """The message in ``data``; RemoteProtocolError on anything else."""
    plain = unpack(data, MAX_MESSAGE_BYTES)
    if not (isinstance(plain, list) and len(plain) == 3):
        raise RemoteProtocolError("a message is [protocol, kind, fields]")
    protocol, kind, body = plain
    if protocol != PROTOCOL or isinstance(protocol, bool):
        raise RemoteProtocolError(f"protocol {protocol!r:.20}, this peer speaks {PROTOCOL}")
    if not isinstance(kind, str) or kind not in _kinds:
        raise RemoteProtocolError(f"unknown kind {kind!r:.40}")
    return from_plain(_kinds[kind], body)


def pack_value(value: Any) -> bytes:
    """The bytes of a dataclass that travels inside a message, or lies on disk; read it with ``unpack_value``."""
    packed: bytes = msgpack.packb(to_plain(value), use_bin_type=True)
    return packed


def unpack_value(cls: type[T], data: bytes, max_bytes: int) -> T:
    """The reverse of ``pack_value``, checked; RemoteProtocolError."""
    return from_plain(cls, unpack(data, max_bytes))


def unpack(data: bytes | memoryview, max_bytes: int) -> Any:
    """msgpack with limits; RemoteProtocolError instead of msgpack's many exceptions."""
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"{len(data)} bytes, the limit is {max_bytes}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_array_len=min(
                MAX_ITEMS, len(data)
            ),  # an item has a byte at least; lists are made as announced
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"not msgpack: {type(error).__name__}") from None


def to_plain(value: Any) -> Any:
    """Nested lists of plain values for a dataclass (also one that is not a registered message)."""
    return _encoder(type(value))(value)


def from_plain(cls: type[T], plain: Any) -> T:
    """The reverse of ``to_plain``, checked; RemoteProtocolError."""
    try:
        return typing.cast(T, _decoder(cls)(plain))
    except ValueError as error:  # __post_init__ of the dataclass
        raise RemoteProtocolError(f"{cls.__name__}: {error}") from None


def _encoder(hint: Any) -> Encoder:
    if hint not in _encoders:
        _encoders[hint] = _make_encoder(hint)
    return _encoders[hint]


def _make_encoder(hint: Any) -> Encoder:
    if is_dataclass(hint):
        return _dataclass_encoder(typing.cast(type, hint))
    return _plain_value


def _plain_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _encoder(type(value))(value)
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    if isinstance(value, enum.IntEnum):
        return int(value)
    return value


def _dataclass_encoder(cls: type) -> Encoder:
    names = [field.name for field in fields(cls)]

    def run(value: Any) -> list[Any]:
        return [_plain_value(getattr(value, name)) for name in names]

    return run


def _decoder(hint: Any) -> Decoder:
    if hint not in _decoders:
        _decoders[hint] = _make_decoder(hint)
    return _decoders[hint]


def _make_decoder(hint: Any) -> Decoder:
    if is_dataclass(hint):
        return _dataclass_decoder(typing.cast(type, hint))
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _optional_decoder(hint)
    if origin is tuple:
        return _tuple_decoder(typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return _enum_decoder(hint)
    if hint in (int, str, bytes, bool, float):
        return _scalar_decoder(hint)
    raise TypeError(f"no wire form for {hint!r}")


def _scalar_decoder(cls: type) -> Decoder:
    def run(plain: Any) -> Any:
        if cls is float and type(plain) is int:
            return float(plain)
        if type(plain) is not cls:
            raise RemoteProtocolError(f"{type(plain).__name__} where {cls.__name__} belongs")
        return plain

    return run


def _enum_decoder(cls: type[enum.IntEnum]) -> Decoder:
    def run(plain: Any) -> enum.IntEnum:
        if type(plain) is not int:
            raise RemoteProtocolError(f"{type(plain).__name__} where {cls.__name__} belongs")
        try:
            return cls(plain)
        except ValueError:
            raise RemoteProtocolError(f"no {cls.__name__} is {plain}") from None

    return run


def _optional_decoder(hint: Any) -> Decoder:
    args = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    if len(args) != 1:
        raise TypeError(f"no wire form for {hint!r}")
    inner = _decoder(args[0])
    return lambda plain: None if plain is None else inner(plain)


def _tuple_decoder(args: tuple[Any, ...]) -> Decoder:
    if len(args) == 2 and args[1] is Ellipsis:
        item = _decoder(args[0])

        def run_many(plain: Any) -> tuple[Any, ...]:
            if type(plain) is not list:
                raise RemoteProtocolError(f"{type(plain).__name__} where a list belongs")
            return tuple([item(part) for part in plain])

        return run_many
    items = [_decoder(arg) for arg in args]

    def run_fixed(plain: Any) -> tuple[Any, ...]:
        if type(plain) is not list or len(plain) != len(items):
            raise RemoteProtocolError(f"a list of {len(items)} belongs here")
        return tuple([decode_item(part) for decode_item, part in zip(items, plain, strict=True)])

    return run_fixed


def _dataclass_decoder(cls: type) -> Decoder:
    hints = typing.get_type_hints(cls)
    specs: list[tuple[str, Decoder]] = [(field.name, _decoder(hints[field.name])) for field in fields(cls)]

    def run(plain: Any) -> Any:
        if type(plain) is not list or len(plain) != len(specs):
            raise RemoteProtocolError(f"{cls.__name__} has {len(specs)} fields")
        try:
            values = {name: decoder(part) for (name, decoder), part in zip(specs, plain, strict=True)}
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{cls.__name__}: {error}") from None
        return cls(**values)

    return run
