"""What docs/repair.md says is what happens: commands, figures, names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from p2p_dmc.cli import main
from p2p_dmc.config import AgentSettings
from p2p_dmc.data.store import SPARED_BYTES, SPARED_PART
from p2p_dmc.observe import reports
from tests.observe.test_reports import placement_facts, rendered

ROOT = Path(__file__).parents[1]
DOC = (ROOT / "docs" / "repair.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    (?:watch )?(dmc-peer .*)$", DOC, re.M))
def test_commands(line: str) -> None:
    _, name, *words = shlex.split(line)
    main.commands[name].make_context(name, words)  # UsageError for what it does not know


def test_the_line_of_how_it_stands() -> None:
    [quoted] = re.findall(r"^> (.*)$", DOC, re.M)
    facts = placement_facts()
    facts["datasets"][0] |= {"under_replicated": 0, "in_flight": 0, "unverified": 0, "lost": 0}
    assert quoted in rendered(reports.render_placement, facts, 10_000).splitlines()
    for word in re.findall(r"([a-z -]+) 0", quoted):
        assert f"| {word.strip()} |" in DOC


def test_figures() -> None:
    settings = AgentSettings()
    said = {
        f"for {settings.reconcile_still_ms / 1000:g} s, and given up": "to hold",
        f"for {settings.drop_still_ms // 1000} s. Each": "given up",
        f"at {settings.scrub_bytes_s >> 20} MiB a second": "reads",
        f"more than {reports.MOST_SHARDS} shards": "listed",
    }
    text = " ".join(DOC.split())
    assert all(words in text for words in said)
    assert settings.scrub_pass_s == 86_400 and "once a day" in text
    assert settings.pledge_fresh_s == 3600 and "within the last hour" in text
    assert (
        f"{SPARED_PART:.0%}".replace("%", " %") in text
        and SPARED_BYTES == 1 << 30
        and "1 GiB at most" in text
    )
    assert settings.differ_still_ms and "again every minute" in text


def test_names_and_paths() -> None:
    for name in re.findall(r"`([a-z_]+_(?:ms|s))`", DOC):
        assert hasattr(AgentSettings(), name)
    for path in re.findall(r"`?((?:docs|p2p_dmc|tests)/[\w./]+\.(?:md|py))`?", DOC):
        assert (ROOT / path).exists(), path
