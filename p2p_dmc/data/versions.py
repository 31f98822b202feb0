"""Versions of one data set: which of them a name means, and the shards that they share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from p2p_dmc.data.manifest import Manifest
from p2p_dmc.errors import UserError

MIN_PREFIX = 4
"""Digits of a digest that name a version."""


def is_clash(one: Manifest, other: Manifest) -> bool:
    """Whether two of one name are different data sets: no versions of one, or two that both follow the same one."""
    return one.digest != other.digest and (one.first != other.first or one.generation == other.generation)


def versions(manifests: Iterable[Manifest], name: str) -> list[Manifest]:
    """Of the data set of that name, the newest first. Raises UserError when there are two such data sets."""
    found = sorted(
        (one for one in manifests if one.name == name), key=lambda one: (-one.generation, one.digest)
    )
    for other in found[1:]:
        clashing = [one for one in found if is_clash(one, other)]
        if clashing:
            digests = " and ".join(sorted((clashing[0].digest.hex(), other.digest.hex())))
            raise UserError(
                f"{name!r}: different data sets of this name, {digests}; seed one under another --name"
            )
    return found


def meant(manifests: Iterable[Manifest], text: str) -> list[Manifest]:
    """What a script means by a name, or by ``NAME@DIGEST`` for one version: the versions, the newest first.

    ``DIGEST``: the first digits of the version's digest. Two data sets of one name are no versions: all are there.
    """
    known = list(manifests)
    found = [one for one in known if one.name == text]
    if not found:
        name, _, digest = text.rpartition("@")
        if len(digest) >= MIN_PREFIX:
            found = [one for one in known if one.name == name and one.digest.hex().startswith(digest)]
    return sorted(found, key=lambda one: (-one.generation, one.digest))


def link(source: Path, target: Path) -> bool:
    """Give a shard's file a second name; False where the file system cannot."""
    try:
        target.parent.mkdir(exist_ok=True)
        os.link(source, target)
    except OSError:
        return False
    return True
