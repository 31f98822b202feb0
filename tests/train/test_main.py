"""The trainer's process: how a script starts, how it ends, and that it never outlives its agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_dmc.train.main import main
from p2p_dmc.wire import trainer_messages as tm

ROOT = Path(__file__).parents[2]


def run_script(
    path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> tuple[int, str, str]:
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["x"])
    monkeypatch.setattr(sys, "path", ["y", *sys.path])
    monkeypatch.setattr("p2p_dmc.train.main.die_with_parent", lambda: None)
    code = main([str(path), *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit", 0),
        ("raise SystemExit('no')", 1),
        ("from p2p_dmc.errors import RunStopped; raise RunStopped()", 0),
        ("raise KeyboardInterrupt", 130),
        ("from p2p_dmc import UserError; raise UserError('x is 1: make it 2')", 1),
        ("1/0", 1),
    ],
)
def test_exit_codes(
    text: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got, _, err = run_script(tmp_path / "script.py", text, capsys, monkeypatch)
    assert got == code
    if "UserError" in text:
        assert err == "error: x is 1: make it 2\n"
    if text == "1/0":
        assert "ZeroDivisionError" in err and 'script.py", line 1' in err
        assert "runpy" not in err  # how the script was started is not the user's business


def test_a_script_sees_what_python_would_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "neighbour_module.py").write_text("x = 5")
    text = "import sys, neighbour_module; print(__name__, sys.argv[1:], neighbour_module.x, __file__)"
    code, out, _ = run_script(tmp_path / "script.py", text, capsys, monkeypatch, "-a", "b c")
    assert code == 0
    assert out == f"__main__ ['-a', 'b c'] 5 {tmp_path / 'script.py'}\n"


def test_without_a_script(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p_dmc.train.main.die_with_parent", lambda: None)
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, p2p_dmc; assert 'torch' not in sys.modules; dir(p2p_dmc); print(p2p_dmc.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip()


def test_a_trainer_does_not_outlive_its_agent(tmp_path: Path) -> None:
    """The lifeline's end reaches a script that is busy in its own code and looks at nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import threading\n"
        "from p2p_dmc.train.link import AgentLink\n"
        "import os\n"
        f"AgentLink('ipc://{tmp_path}/nobody', int(os.environ['{tm.ENV_LIFELINE}']), lambda m: False)\n"
        "print('busy', flush=True)\n"
        "threading.Event().wait()\n"
    )
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "p2p_dmc.train.main", str(script)],
        env={**os.environ, tm.ENV_LIFELINE: str(read)},
        pass_fds=[read],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        assert process.poll() is None
        os.close(write)
        assert process.wait(20) == 1
    finally:
        process.kill()
        process.wait()
        os.close(read)
        if process.stdout is not None:
            process.stdout.close()
