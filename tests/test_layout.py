"""The shape of the house (DESIGN section 3): what may import what, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "p2p_dmc"
MOST_LINES = 500
MOST_LINES_PER_FUNCTION = 60
PURE = {
    "__future__",
    "bisect",
    "collections",
    "collections.abc",
    "dataclasses",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "re",
    "statistics",
    "string",
    "struct",
    "types",
    "typing",
    "msgpack",
    "numpy",
    "numpy.typing",
    "random",  # for its type: `impurities` says what else of it is not
    "xxhash",
}
"""Modules that core/ may import besides itself and p2p_dmc.errors."""
IMPURE_NAMES = {"open", "print", "input", "exec", "eval", "__import__", "globals"}


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name) of everything that is imported anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: say the whole name"
            yield from ((node.module or "", alias.name) for alias in node.names)


def impurities(text: str) -> list[str]:
    """What a file of core/ may not have, in words."""
    tree = ast.parse(text)
    found = []
    for module, name in imports(tree):
        own = module in ("p2p_dmc.core", "p2p_dmc.errors") or module.startswith("p2p_dmc.core.")
        global_random = module == "random" and name not in (None, "Random")
        if global_random or not (own or module in PURE):
            found.append(f"imports {module}" + (f".{name}" if name else ""))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in IMPURE_NAMES:
            found.append(f"uses {node.id}")
        if isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            if path in ("np.random", "numpy.random") or (
                path.startswith("random.") and path != "random.Random"
            ):
                found.append(f"uses {path}")
    return found


def long_functions(text: str) -> list[str]:
    return [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MOST_LINES_PER_FUNCTION
    ]


def test_the_scan_sees_what_it_should() -> None:
    assert len(sources(PACKAGE / "core")) > 3
    for line in (
        "import numpy as np",
        "import random",
        "from random import Random",
        "import p2p_dmc.core.ledger",
    ):
        assert impurities(line) == [], line
    for line in (
        "import time",
        "from random import random",
        "import random\nrandom.random()",
        "import random\nrandom.SystemRandom()",
        "import os.path",
        "import torch",
        "from p2p_dmc.wire import codec",
        "from p2p_dmc import config",
        "def f() -> None:\n    import socket",
        "import numpy as np\nnp.random.rand()",
        "open('x')",
    ):
        assert len(impurities(line)) == 1, line
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == ["f (61 lines)"]


@pytest.mark.parametrize("path", sources(PACKAGE / "core"), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_core_is_pure(path: Path) -> None:
    assert impurities(path.read_text()) == []


def test_no_file_is_too_long() -> None:
    programs = [path for folder in ("bin", "examples", "benchmarks") for path in (ROOT / folder).rglob("*")]
    code = [
        path for path in programs if path.is_file() and (path.suffix == ".py" or path.parent.name == "bin")
    ]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*sources(), *code]}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_no_function_is_too_long() -> None:
    found = {str(path.relative_to(ROOT)): long_functions(path.read_text()) for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_agent_and_the_command_line_never_import_torch() -> None:
    """Every module of theirs, in a process of its own; one process for all, since imports only add up."""
    torch_free = [
        path for folder in ("core", "wire", "agent", "observe") for path in sources(PACKAGE / folder)
    ]
    torch_free += [path for path in (PACKAGE / "cli.py", PACKAGE / "config.py") if path.exists()]
    names = [module_name(path) for path in torch_free if path.name != "__main__.py"]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {{name}} imports torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
