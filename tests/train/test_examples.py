"""The example scripts, run as a user would, against a scripted agent."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.scripted import ScriptedAgent

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    module: Any, agent: ScriptedAgent, epochs: int, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> None:
    for key, value in agent.environment.items():
        monkeypatch.setenv(key, value)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    monkeypatch.setattr(sys, "argv", ["script.py", f"--epochs={epochs}", "--data=numbers", *arguments])
    with agent.play(lambda agent: agent.lead(epochs)):
        module.main()


def test_digits_are_written_and_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = example("train_digits")
    monkeypatch.setattr(sys, "argv", ["train_digits.py", "--write", str(tmp_path / "digits")])
    digits.main()
    assert "1797 digits written" in capsys.readouterr().out
    agent = ScriptedAgent(tmp_path, tmp_path / "digits", shard_bytes=300_000)
    assert agent.manifest.classes == tuple("0123456789")
    run(digits, agent, 3, monkeypatch)
    line = capsys.readouterr().out
    accuracy = float(line.split(": ")[1].split("%")[0])
    assert accuracy > 90
    assert "of 1797 digits" in line


def test_the_byte_model_learns_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stdlib = example("train_stdlib")
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "empty.py").write_bytes(b"")
    for path in sorted(EXAMPLES.parent.glob("p2p_dmc/*/*.py"))[:40]:
        (sources / f"{path.parent.name}_{path.name}").write_bytes(path.read_bytes())
    run(stdlib, ScriptedAgent(tmp_path, sources, shard_bytes=200_000), 3, monkeypatch, "--window=32")
    losses = [
        float(line.split("mean loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()[:3]
    ]
    assert losses[2] < losses[1] < losses[0] < 6


def test_a_window_is_the_files_own() -> None:
    stdlib = example("train_stdlib")
    text = bytes(range(200))
    x, y = stdlib.window_of({"py": text, "__key__": "a/b"}, 16)
    again = stdlib.window_of({"py": text, "__key__": "a/b"}, 16)
    assert torch.equal(y, again[1]) and x[0] == stdlib.PAD and torch.equal(x[1:], y[:-1])
    assert bytes(y.tolist()) in text
    x, y = stdlib.window_of({"py": b"ab", "__key__": "c"}, 4)
    assert y.tolist() == [97, 98, stdlib.PAD, stdlib.PAD]
    _, empty = stdlib.window_of({"py": b"", "__key__": "d"}, 4)
    logits = torch.zeros(1, 4, 257)
    assert stdlib.loss_of(logits, empty[None]).item() == 0  # not NaN
    assert stdlib.loss_of(logits, y[None]).item() == pytest.approx(torch.log(torch.tensor(257.0)).item())


def test_the_byte_model_sees_no_future() -> None:
    stdlib = example("train_stdlib")
    torch.manual_seed(0)
    model = stdlib.ByteTransformer(8).eval()
    x = torch.randint(0, 256, (1, 8))
    changed = x.clone()
    changed[0, 5] = (x[0, 5] + 1) % 256
    same = torch.isclose(model(x), model(changed), atol=1e-5).all(dim=2)[0].tolist()
    assert same == [True] * 5 + [False] * 3
    assert 200_000 < sum(p.numel() for p in model.parameters()) < 500_000
