"""docs/export.md does what it says: its commands and its script, one after the other, in a home that has trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from p2p_dmc.cli import main as cli
from tests.agent.test_export import Mixed, Peer

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "export.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)
CHECK = """
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
print(float(model.scale), float(optimizer.state[model.scale]["step"]))
"""


def test_the_commands_and_the_script(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.checkpoint((3, 9))
    peer.keep_inner()
    peer.finish()
    (tmp_path / ".p2p_dmc").symlink_to(peer.home)
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("from tests.agent.test_export import Mixed as Net\n")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    [commands] = [text for language, text in BLOCKS if language == "sh"]
    [script] = [text for language, text in BLOCKS if language == "python"]
    said = run("bash", "-e", "-c", commands)
    assert said.count("final model of run 'train', view 3 round 9") == 3
    assert said.count("checkpoint of run 'train', view 3 round 9") == 1
    assert said.count("this peer's state of Adam, view 3 round 8") == 1
    scale = float(Mixed(2).scale.detach())
    assert run(sys.executable, "-c", script + CHECK) == f"{scale} 2.0\n"
    loaded = torch.load(work / "resume.pt", weights_only=True)
    assert loaded["half.weight"].dtype == torch.bfloat16


def test_options_named_on_the_page_exist() -> None:
    known = {option for name in ("export", "join") for p in cli.commands[name].params for option in p.opts}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", PAGE))
    assert {"--from", "--with-optimizer"} <= named <= known, named - known
