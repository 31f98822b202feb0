"""Every setting of the agent, with unit, default and reason. Cores have their own settings classes, built here."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_PORT = 7400
"""First port tried; the next free one is taken when it is in use."""

DEFAULT_REPLICAS = 2
"""One machine may die without a shard being lost, at twice the disk space."""

DEFAULT_CAPACITY_BYTES = 100 << 30
"""What a peer offers for shards; the weight of its share of the placement."""


DOMAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}")
"""A failure domain's name: ASCII, so that what looks the same is the same, and short, for gossip carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Timing and limits of one agent. All in the units of the names."""

    tick_ms: int = 100
    """How often the shell asks the cores for due timers when nothing arrives; idle cost against reaction."""

    found_still_ms: int = 700
    """Founding waits until the set of ready trainers has not changed for this long: four joins make one view."""

    join_retry_ms: int = 500
    """A ready trainer outside the view repeats its request; messages may be lost."""

    group_timeout_ms: int = 3000
    """gloo's bound on lack of progress (connecting takes up to five of it): the backstop behind verdicts."""

    fetch_chunk_bytes: int = 1 << 20
    """Range of a manifest or of a state: large against the round trip, small against a head-of-line delay."""

    fetch_range_bytes: int = 4 << 20
    """Largest range of a shard: each costs both ends half a millisecond of processor time, whatever its size. Who
    answers slowly is asked for less."""

    fetch_piece_bytes: int = 128 << 10
    """The smallest range: what a slow source can send within range_timeout_ms, and what peers pass on."""

    fetch_parallel: int = 4
    """Shards fetched at once, at least: while one is verified the next ones come."""

    range_timeout_ms: int = 4000
    """A source that sends nothing for this long although it was asked is left for another."""

    holdings_interval_ms: int = 5000
    """Holdings are repeated this often to whoever may have missed them; changes are told at once."""

    reconcile_still_ms: int = 1500
    """A shard is fetched when it has been this peer's to keep for so long: bytes wait out flapping, takeover does
    not."""

    differ_still_ms: int = 20_000
    """Peers that mean another placement are named after this long, with membership still: gossip needs seconds."""

    drop_still_ms: int = 30_000
    """A copy is given up when it has not been this peer's to keep for so long: what flaps back need not be fetched."""

    pledge_again_ms: int = 1000
    """Who keeps a copy that is to be given up is asked so often: words may be lost, and a shard be looked at first."""

    pledge_fresh_s: float = 3600.0
    """Of a shard that was verified longer ago no copy is pledged: it is verified first."""

    scrub_pass_s: float = 86_400.0
    """Every shard held is read from the disk and verified once in so long: a disk's silent errors are rare."""

    scrub_bytes_s: int = 256 << 20
    """How fast shards are verified that were not yet in this life, or that somebody asks about: it leaves the disk to
    training."""

    holdings_bytes_s: int = 1 << 20
    """What peers are told of holdings may take so much: with a million shards and 256 peers they hear of changes in
    minutes, with a thousand shards at once."""

    checkpoint_every_s: float = 60.0
    """Committed state is written this often; all peers killed at once lose at most this much."""

    checkpoints_kept: int = 3
    """Newest checkpoints kept per run."""

    trainer_restarts: int = 3
    """A trainer killed by a signal is restarted at most so often within trainer_restart_window_s."""

    trainer_restart_window_s: float = 600.0

    trainer_silence_s: float = 15.0
    """A trainer that says nothing for so long is stopped or stuck in foreign code: it is killed and started again, for
    everybody waits for it at the barrier. It says something every second, from a thread of its own."""

    leave_grace_s: float = 10.0
    """A graceful leave waits at most this long for the others to take over."""


def parse_size(text: str) -> int:
    """Bytes of "64MiB", "100GiB", "1.5GB" or a plain number; ValueError with the accepted forms."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
        "k": 1 << 10,
        "m": 1 << 20,
        "g": 1 << 30,
    }
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        size = float(number) * units[unit]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not a size; write 64MiB, 100GiB or a number of bytes") from None
    if not 1 <= size < 1 << 60:
        raise ValueError(f"{text!r} is not a size; write 64MiB, 100GiB or a number of bytes")
    return int(size)


LEAST_RATE = 1_000_000
"""Less than this, bytes a second, and a range of a state takes longer than range_timeout_ms."""


def parse_rate(text: str) -> int:
    """Bytes a second of "20MB/s", "20MB", "100Mbit/s" or a plain number; ValueError with the accepted forms."""
    words = text.strip().lower().removesuffix("/s")
    bits = re.fullmatch(r"([\d.]+)\s*([kmg]?)(?:bit|bps)", words)
    try:
        rate = parse_size(f"{bits[1]}{bits[2]}b") // 8 if bits else parse_size(words)
    except ValueError:
        raise ValueError(f"{text!r} is not a rate; write 20MB/s or 100Mbit/s") from None
    if rate < LEAST_RATE:
        raise ValueError(f"{text!r} is too slow to fetch anything; at least 1MB/s")
    return rate


def format_size(size_bytes: float) -> str:
    """ "17.3 MiB" and the like, for people."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
