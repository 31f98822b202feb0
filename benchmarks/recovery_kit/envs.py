"""An environment of its own for each neighbour, made once under a folder and used again."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "torchft": ("torchft", "numpy"),
    "hivemind": ("hivemind",),
    "torchrun": ("numpy",),
}
IMPORTS = {"torchft": "torchft", "hivemind": "hivemind", "torchrun": "torch.distributed.run"}
INSTALL_S = 1800.0
IMPORT_S = 120.0


class UnavailableError(Exception):
    """Why a neighbour cannot be installed or imported here, in one line."""


def python_of(folder: Path, name: str, *, install: bool) -> Path:
    """The interpreter of a neighbour's environment; UnavailableError."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        if not install:
            raise UnavailableError(f"not installed in {folder}: run without --quick once")
        make(folder / name, PACKAGES[name])
    tried = run([python, "-c", f"import {IMPORTS[name]}"], IMPORT_S)
    if tried.returncode:
        raise UnavailableError(f"import {IMPORTS[name]}: {last_line(tried.stderr)}")
    return python


def make(folder: Path, packages: tuple[str, ...]) -> None:
    """A venv with the torch that this program's own environment has, and ``packages``."""
    draft = folder.with_name(f"{folder.name}.new")
    torch = importlib.metadata.version("torch").partition("+")[0]
    venv.create(draft, clear=True, with_pip=True)
    done = run(
        [draft / "bin" / "python", "-m", "pip", "install", "-q", f"torch=={torch}", *packages], INSTALL_S
    )
    if done.returncode:
        raise UnavailableError(f"pip install torch=={torch} {' '.join(packages)}: {last_line(done.stderr)}")
    draft.rename(folder)


def version_of(python: Path, name: str) -> str:
    """Of the neighbour's package."""
    package = {"torchrun": "torch"}.get(name, name)
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return f"{package} {run([python, '-c', code], IMPORT_S).stdout.strip()}"


def run(command: list[object], timeout_s: float) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"not done after {timeout_s:g} s")


def last_line(text: str) -> str:
    """Of what a command complained, for people."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return lines[-1].strip()[:300] if lines else f"no word from {Path(sys.executable).name}"
