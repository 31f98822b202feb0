"""What options of dmc-peer take besides words and numbers; a mistake is click's usage error."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from p2p_dmc.config import DOMAIN as FAILURE_DOMAIN
from p2p_dmc.config import parse_size

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic before click 8.4


class Size(ParamType):
    """Bytes, or bytes a second; the word ``auto`` too, where that is allowed."""

    name = "size"

    def __init__(self, auto: bool = False, parse: Callable[[str], int] = parse_size) -> None:
        self._auto, self._parse = auto, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if isinstance(value, int) or (self._auto and value == "auto"):
            return value  # type: ignore[no-any-return] # an int or "auto"
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(f"{error}{', or auto' if self._auto else ''}", param, ctx)


class Fraction(ParamType):
    """Of something, neither nothing nor all of it."""

    name = "fraction"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            fraction = float(value)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < 1:
            self.fail(f"{value!r} is not between 0 and 1; write for example 0.1", param, ctx)
        return fraction


class Seconds(ParamType):
    """A length of time in seconds, written 30s, 5m or 1h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", str(value).strip())
        if match is None or float(match[1]) <= 0:
            self.fail(f"{value!r} is not a time; write 30s, 5m or 1h", param, ctx)
        return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}[match[2]]


class Address(ParamType):
    """tcp://HOST:PORT, or several of them, comma-separated."""

    name = "address"

    def __init__(self, several: bool = False) -> None:
        self._several = several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        for part in str(value).split(",") if self._several else [str(value)]:
            match = re.fullmatch(r"(?:tcp://)?(\[[^\]/\s]+\]|[^/\s:\[\]]+):(\d{1,5})", part.strip())
            if match is None or int(match[2]) > 65535:
                self.fail(f"{part.strip()!r} is not an address; write tcp://HOST:PORT", param, ctx)
        return str(value)


class Domain(ParamType):
    """The name of a failure domain."""

    name = "domain"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value and not FAILURE_DOMAIN.fullmatch(value):
            self.fail(f"{value!r} is not a name like rack1 (letters, digits, '.', '_', '/', '-')", param, ctx)
        return str(value)
