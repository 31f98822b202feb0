"""What a script means by the data sets it names: one, or several in shares or in passes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from p2p_dmc.data.manifest import HELD_OUT, Manifest
from p2p_dmc.data.mixture import Mixture, Part
from p2p_dmc.data.proportions import check_weights, passes_for
from p2p_dmc.errors import UserError

USAGE = (
    'write peer.dataset("web"), peer.dataset({"web": 0.7, "code": 0.3}) for shares of the samples, '
    'or peer.dataset(repeat={"web": 1, "code": 3}) for passes an epoch'
)


def mixture_meant(
    name: object, repeat: object, tolerance: float, manifest_of: Callable[[str], Manifest]
) -> Mixture:
    """By the arguments of ``peer.dataset``; UserError when they make none. A mixture is told to the user.

    ``manifest_of``: waits for the data set of a name, in the version that it means.
    """
    if (name is None) == (repeat is None):
        raise UserError(f"data sets {name!r:.100} and repeat {repeat!r:.100}: {USAGE}")
    if isinstance(name, str):
        return Mixture.of(manifest_of(name))
    given = _named(name if repeat is None else repeat)
    if repeat is None:
        check_weights(given, tolerance)
    manifests = {text: manifest_of(text) for text in sorted(given)}
    _refuse_held_out({manifest.name for manifest in manifests.values()})
    passes = (
        given
        if repeat is not None
        else passes_for(given, {t: len(m) for t, m in manifests.items()}, tolerance)
    )
    mixture = Mixture(tuple(Part(manifest, passes[text]) for text, manifest in manifests.items()))
    if mixture.is_mixed:
        print(described(mixture), file=sys.stderr, flush=True)
    return mixture


def _refuse_held_out(names: set[str]) -> None:
    """What was held out of a data set is there to tell how well the rest of it was learnt."""
    for name in sorted(names):
        if f"{name}{HELD_OUT}" in names:
            raise UserError(
                f"data set {name + HELD_OUT!r} is what was held out of {name!r}, and both are in the mixture; leave "
                "one of them out, or seed all of it under another --name without --val-fraction"
            )


def _named(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not given or not all(isinstance(text, str) for text in given):
        raise UserError(f"data sets {given!r:.100}: {USAGE}")
    return dict(given)


def described(mixture: Mixture) -> str:
    """One line: what an epoch is, and the shares that were reached."""
    shares = ", ".join(f"{part.manifest.name} {part.samples / mixture.samples:.1%}" for part in mixture.parts)
    return f"an epoch is {mixture.name}: {mixture.samples} samples, {shares}"
