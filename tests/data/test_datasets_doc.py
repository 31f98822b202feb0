"""What docs/datasets.md shows is what the program says, and its commands are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2p_dmc.cli import main
from p2p_dmc.core.braids import INTERLEAVED
from p2p_dmc.data.formats import CLASS, FORMATS
from p2p_dmc.data.index import MAX_KEY_BYTES
from p2p_dmc.data.manifest import HELD_OUT
from p2p_dmc.data.mixture import MAX_PARTS, MAX_PASSES, SHARDS
from p2p_dmc.data.proportions import TOLERANCE
from p2p_dmc.data.readers.base import COMPRESSIONS, PICKLES
from p2p_dmc.train.mixing import described
from tests.data.test_mixture import MIXED

TEXT = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    (dmc-peer .*)$", TEXT, re.M))
def test_commands(line: str) -> None:
    _, name, *words = shlex.split(line)
    main.commands[name].make_context(name, words)  # UsageError for what it does not know


def test_options() -> None:
    known = {option for parameter in main.commands["seed-dataset"].params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT))
    assert named <= known, named - known


def test_the_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    photos = tmp_path / "photos"
    for name in ("cat/1.jpg", "cat/2.jpg", "dog/1.jpg", "dog/2.jpg"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"twelve bytes")
    [shown] = re.findall(r"```\n(/home/me/photos.*?)```", TEXT, re.DOTALL)
    done = CliRunner().invoke(main, ["seed-dataset", str(photos), "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    assert capfd.readouterr().err.replace(str(photos), "/home/me/photos") == shown


def test_names_that_the_text_gives() -> None:
    for ending in (*COMPRESSIONS, *PICKLES, *(one for form in FORMATS for one in form.endings)):
        assert f"`{ending}`" in TEXT, ending
    assert f"`{CLASS}`" in TEXT and f"`NAME{HELD_OUT}`" in TEXT and f"{MAX_KEY_BYTES} bytes" in TEXT


def test_the_line_of_a_mixture() -> None:
    assert f"    {described(MIXED)}\n" in TEXT
    assert f"more than {MAX_PASSES} times, and at most {MAX_PARTS} can be mixed" in TEXT
    assert SHARDS == 1024 and "about a thousand an epoch" in TEXT and INTERLEAVED == 16
    assert TOLERANCE == 0.01 and "within a percentage point" in TEXT


def test_the_scripts_compile() -> None:
    scripts = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(scripts) == 7
    for script in scripts:
        compile(script, "datasets.md", "exec")
