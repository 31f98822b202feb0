"""What the demo does, with which numbers, and on which files."""

from __future__ import annotations

import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from p2p_dmc.errors import UserError

SCRIPT = Path(__file__).with_name("train_stdlib.py")
RUN = SCRIPT.stem
DATASET = "stdlib"
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the library that are not its sources, or of which distributions differ in what they ship."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every number of the demo."""

    seed: int
    """Of the data's order, the model, and who is killed."""
    peers: int = 4
    replicas: int = 2
    epochs: int = 15
    """About 70 seconds of training for 4 peers on two free cores: enough for a loss that visibly falls."""
    files: int | None = None
    """At most so many source files, spread evenly over their sorted names; None for all."""
    batch_size: int = 4
    window: int = 256
    """Bytes of each file."""
    tau0: int = 16
    t0_s: float = 4.0
    """AdaComm looks at the loss so often, in seconds of its agreed clock."""
    kill: bool = True
    """False: nobody is killed, for comparison."""
    kill_at: float = 1 / 3
    """Share of the run's samples after which a peer is killed."""
    return_at: float = 0.5
    """Share after which it is started again: early enough to import torch and take part."""
    stall_s: float = 90.0
    """The demo gives up when no peer writes anything for so long (importing torch takes its time)."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"p{i}" for i in range(1, self.peers + 1))

    @property
    def script_arguments(self) -> list[str]:
        options = {
            "data": DATASET,
            "epochs": self.epochs,
            "batch-size": self.batch_size,
            "window": self.window,
            "seed": self.seed,
            "tau0": self.tau0,
            "t0": self.t0_s,
        }
        return [f"--{name}={value}" for name, value in options.items()]


def full(seed: int) -> Plan:
    """What `bin/demo` shows."""
    return Plan(seed=seed)


def quick(seed: int) -> Plan:
    """The same story in less time, for tests."""
    return Plan(seed=seed, epochs=14, files=240, window=128, tau0=5, t0_s=1.5, return_at=0.36)


def source_files(root: Path) -> list[Path]:
    """The library's own sources below ``root``, as relative paths in a fixed order."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix == ".py" and path.is_file() and not path.is_symlink():
                found.append(path.relative_to(root))
    return sorted(found)


def stage_sources(target: Path, limit: int | None) -> tuple[int, int]:
    """Copy this machine's standard library's sources to ``target``; (files, bytes).

    A copy, so that the walk does not meet what else lives in that folder (site-packages is thousands of files).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = source_files(root)
    if limit is not None and len(files) > limit:
        files = [files[i * len(files) // limit] for i in range(limit)]
    if not files:
        raise UserError(f"{root} has no Python sources; the demo needs a Python that comes with its library")
    total = 0
    for relative in files:
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / relative, copy)
        total += copy.stat().st_size
    return len(files), total
