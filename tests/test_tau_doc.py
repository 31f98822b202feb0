"""What docs/tau.md says of AdaComm's settings is so."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import p2p_dmc as dmc
from p2p_dmc.core.adacomm import AUTO_ROUNDS, AUTO_STEPS, LEAST_MEASURED, RULES

TEXT = (Path(__file__).parents[1] / "docs" / "tau.md").read_text()
DOC = " ".join(TEXT.split())


@pytest.mark.parametrize(
    "said",
    [
        f"`t0_s` seconds ({dmc.AdaComm.t0_s:g})",
        f"`loss_floor` ({dmc.AdaComm.loss_floor:g})",
        f"`tau_max` ({dmc.AdaComm.tau_max},",
        f'`"{dmc.AdaComm.policy}"` (default)',
        f'`tau0="{dmc.AdaComm.tau0}"` (default) takes {LEAST_MEASURED} steps',
        f"`{AUTO_STEPS} * alpha`, at least {LEAST_MEASURED}",
        "until three rounds",
    ],
)
def test_defaults(said: str) -> None:
    assert AUTO_ROUNDS == 3
    assert said in DOC


def test_the_default_share_of_computation() -> None:
    assert f"The default is {dmc.AdaComm.min_utilisation:g};" in DOC


def test_every_setting_and_policy_is_named() -> None:
    for setting in fields(dmc.AdaComm):
        assert re.search(rf"`{setting.name}\b", DOC), setting.name
    assert tuple(re.findall(r'^\| `"(\w+)"`', TEXT, re.M)) == RULES


def test_scripts_compile_and_files_exist() -> None:
    for script in re.findall(r"```python\n(.*?)```", TEXT, re.S):
        compile(script, "tau.md", "exec")
    for name in re.findall(r"`(\w+\.md)`", TEXT):
        assert (Path(__file__).parents[1] / "docs" / name).exists(), name
