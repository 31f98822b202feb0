"""What docs/outer.md says of the outer optimizers is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import p2p_dmc as dmc
from p2p_dmc.core.outer import LEAST_STEPS
from p2p_dmc.train.outer import policy_of

DOC = (Path(__file__).parents[1] / "docs" / "outer.md").read_text()


@pytest.mark.parametrize("name", ["average", "block", "nesterov"])
def test_names(name: str) -> None:
    assert f'`"{name}"`' in DOC
    assert policy_of(name).kind == name  # type: ignore[arg-type]


@pytest.mark.parametrize("call", re.findall(r"`dmc\.((?:Block|Nesterov)\([^)]*\))`", DOC))
def test_what_is_shown_is_the_default(call: str) -> None:
    name = call.partition("(")[0]
    assert repr(getattr(dmc, name)()) == call


def test_the_least_steps() -> None:
    assert f"fewer than {LEAST_STEPS} steps" in DOC
    assert len(re.findall(r"`dmc\.(?:Block|Nesterov)\(", DOC)) == 2
