"""bin/setup-venv with a stand-in for Python that notes what it is asked to do: nothing is downloaded."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
here=$(dirname "$0")
case "$*" in
    *"import torch"*) exit 1 ;;
    *_base_executable*) echo "$0" ;;
    "-m venv"*)
        mkdir -p "$3/bin"
        cp "$0" "$3/bin/python"
        echo "version = 3.11.0" >"$3/pyvenv.cfg"
        ;;
    "-m pip install"*)
        if [[ -n $STALL_AT && $* == *" $STALL_AT"* ]]; then
            echo stalled >&3
            exec tail -f /dev/null
        fi
        [[ $* != *" torch=="* ]] || : >"$here/torch"
        ;;
    -) [[ -e $here/torch ]] ;;
esac
"""


class Checkout:
    """A copy of what the set-up needs, with the stand-in as the only Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"
        self.python = folder / "stand-in" / "python3"
        (folder / "bin").mkdir()
        self.python.parent.mkdir()
        shutil.copy(ROOT / "bin" / "setup-venv", folder / "bin")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def environment(self, **more: str) -> dict[str, str]:
        mine = {"CALLS": str(self.calls_file), "PYTHON": str(self.python), "STALL_AT": "", **more}
        return {**os.environ, **mine}

    def set_up(self, *extras: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(self.folder / "bin" / "setup-venv"), *extras]
        return subprocess.run(
            command,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def calls(self) -> list[str]:
        """What the stand-in was told to do since the last look: environments made, things installed."""
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.write_text("")
        return [line for line in lines if line.startswith("-m") and "--version" not in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_fresh_machine_gets_an_environment_torch_and_the_package(checkout: Checkout) -> None:
    done = checkout.set_up("dev", "examples")
    assert done.returncode == 0, done.stderr
    made, torch, package = checkout.calls()
    assert made == f"-m venv {checkout.folder}/.venv"
    assert torch.endswith(" torch==2.13.0") and package.endswith(f" -e {checkout.folder}[dev,examples]")
    assert "setup: making .venv" in done.stderr and done.stderr.endswith("setup: ready\n")


def test_the_second_call_does_nothing_and_is_silent(checkout: Checkout) -> None:
    checkout.set_up("dev", "examples")
    checkout.calls()
    for extras in (["dev", "examples"], ["examples"], []):
        done = checkout.set_up(*extras)
        assert (done.returncode, done.stdout, done.stderr, checkout.calls()) == (0, "", "", [])


def test_another_extra_or_another_project_file_is_installed_on_top(checkout: Checkout) -> None:
    checkout.set_up("examples")
    checkout.calls()
    checkout.set_up("dev")
    assert [call.rpartition("/")[2] for call in checkout.calls()] == [f"{checkout.folder.name}[dev,examples]"]
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    checkout.set_up()
    assert len(checkout.calls()) == 1
    assert checkout.set_up("dev", "examples").stderr == ""


@pytest.mark.parametrize("stall_at", ["torch==", "-e"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_starts_afresh(checkout: Checkout, stall_at: str, number: int) -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            'exec 3>&"$0"; exec bash "$1" dev',
            str(writing),
            str(checkout.folder / "bin/setup-venv"),
        ],
        env=checkout.environment(STALL_AT=stall_at),
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(writing)
    with process, os.fdopen(reading) as stalled:
        try:
            assert stalled.readline() == "stalled\n"
            os.killpg(process.pid, number)
            assert process.wait(DEADLINE_S) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert not (checkout.folder / ".venv" / ".setup-stamp").exists()
    checkout.calls()
    assert checkout.set_up("dev").returncode == 0
    assert len(checkout.calls()) >= 2
    assert checkout.set_up("dev").stderr == ""


def test_without_a_python_it_says_so_in_one_line(checkout: Checkout) -> None:
    done = checkout.set_up(PYTHON="/no/such/python")
    assert done.returncode == 1
    assert done.stderr == (
        "setup: no Python from 3.10 on found at PYTHON=/no/such/python: install one, or name it in PYTHON\n"
    )
