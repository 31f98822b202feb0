"""The README's paths, commands, script and figures are real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import p2p_dmc as dmc
from p2p_dmc.cli import main as cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


def test_every_path_exists() -> None:
    named = set(re.findall(r"(?<![\w/.])((?:bin|examples|benchmarks|tests)/[\w./-]+)", README))
    assert {"bin/demo", "bin/test", "bin/setup-venv", "examples/train_digits.py"} <= named
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing


COMMANDS = sorted(
    {line.split("#")[0].strip() for _, block in BLOCKS for line in block.splitlines() if "dmc-peer " in line}
)


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_the_program_takes(line: str, tmp_path: Path) -> None:
    words = line.split()
    assert words[0] == "dmc-peer"
    command = cli.commands[words[1]]
    (tmp_path / "train.py").touch()
    context = command.make_context(words[1], [w.replace("~", str(tmp_path)) for w in words[2:]], obj={})
    assert isinstance(context, click.Context)


def test_the_commands_were_found() -> None:
    assert {line.split()[1] for line in COMMANDS} >= {
        "seed-dataset",
        "join",
        "status",
        "placement",
        "stop",
        "leave",
    }


def test_options_named_in_the_text_exist() -> None:
    known = {option for c in cli.commands.values() for p in c.params for option in p.opts}
    known |= {"--write", "--kind", "--moments", "--out"}  # of the programs beside dmc-peer
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", README))
    assert named <= known, named - known


def test_the_script_compiles_and_uses_what_is_there() -> None:
    [script] = [block for language, block in BLOCKS if language == "python"]
    compile(script, "README.md", "exec")
    for name in re.findall(r"dmc\.(\w+)", README):
        assert hasattr(dmc, name), name


def test_the_figures_are_those_of_the_committed_results() -> None:
    shown = subprocess.run(
        [sys.executable, ROOT / "bin" / "readme-figures"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() in README, "run bin/readme-figures --write"
