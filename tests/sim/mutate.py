"""Delete every condition of the agreement and ledger cores in turn, and report which deletions nothing notices.

    python tests/sim/mutate.py                                   all that is not known yet, or whose module changed
    python tests/sim/mutate.py --modules ledger --only advance   the conditions of one function
    python tests/sim/mutate.py --quick --seed 3                  a sample, in at most two minutes

Each mutant is one core module without one condition (see conditions.py), run against a copy of the working tree in
a process of its own: first the unit tests that concern the module, the fastest files first, then the random world.
The first failure ends it; one that runs for too long counts as noticed, by the deadline. What is known to be no
different from the original is listed, with its reason, in equivalent_mutants.py.

The last line of standard output with --json is one object with these keys:
  mutants    how many conditions were deleted
  killed     how many of the deletions something noticed
  by_chance  those of them that only the random world noticed: where, condition, kind, by
  excused    how many of the rest are listed as equivalent
  survivors  the others: where (file:line), function, condition, kind (forced `true` or `false`, `dropped` from an
             and, an or or a chain, `never` for a case)
  wrong      what the list of equivalent ones gets wrong: entries that were noticed, or that name no condition
Exit code 1 if anything survived that is not listed, or the list is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import importlib.machinery
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.sim.conditions import Deletion, deletions, imported, without  # noqa: E402
from tests.sim.equivalent_mutants import EQUIVALENT  # noqa: E402

MODULES = (
    "ledger",
    "braids",
    "assignment",
    "pace",
    "rebalancing",
    "adacomm",
    "quorum",
    "agreement_attempt",
    "agreement_state",
    "agreement_machine",
    "agreement",
    "agreement_messages",
)
RESULTS = Path(__file__).parent / "results" / "mutants.json"
QUICK_S = 90.0
"""With --quick no further mutant begins after so long."""
MEMORY_BYTES = 4 << 30
SLOWER, GRACE_S = 5, 5
"""A mutant may take so many times the processor time of the original, and so many seconds."""
WAIT = 60
"""It may take so many times its processor time, on a machine that has other things to do."""
WORLD, SURVIVED = "the random world", "survived"

Verdict = dict[str, Any]


# --- one mutant, in a child process ----------------------------------------------------------------------


class Mutated(importlib.machinery.SourceFileLoader):
    """Loads one module without one condition."""

    def __init__(self, name: str, path: Path, deletion: Deletion) -> None:
        super().__init__(name, str(path))
        self.deletion = deletion

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        return compile(without(source, self.deletion), self.path, "exec", dont_inherit=True)


class Finder:
    """Finds the one module first."""

    def __init__(self, loader: Mutated) -> None:
        self.loader = loader

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name != self.loader.name:
            return None
        return importlib.machinery.ModuleSpec(name, self.loader, origin=self.loader.path)


class Watch:
    """A plugin of pytest: the first test that failed."""

    failed: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid or 'the tests'} cannot be read"


def tested(paths: Sequence[str]) -> str | None:
    """Run files of tests; the name of what failed, None if nothing did."""
    import pytest

    watch = Watch()
    arguments = ["-x", "-q", "--no-header", "--tb=no", "--assert=plain", "--rootdir", os.getcwd()]
    for plugin in (
        "cacheprovider",
        "unraisableexception",
        "threadexception",
    ):  # the latter two only take time
        arguments += ["-p", f"no:{plugin}"]
    code = pytest.main([*arguments, *paths], plugins=[watch])
    if watch.failed is None and code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return f"pytest ends with {code}"
    return watch.failed


def lived(seeds: int) -> str | None:
    """Random lives of whole peers."""
    from tests.sim import schedule

    for seed in range(seeds):
        try:
            failure = schedule.explore(seed, 500).failure
        except Exception as error:  # noqa: BLE001 - whatever it is, the mutant caused it
            failure = error
        if failure is not None:
            return f"{WORLD}, seed {seed}: {type(failure).__name__}"
    return None


def prepare(module: str, deletion: Deletion | None, cpu_s: int) -> None:
    """In the child: forget the modules under test, and find the changed one in their place; set limits."""
    import hypothesis

    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "p2p_dmc")]:
        del sys.modules[name]
    if deletion is not None:
        loader = Mutated(f"p2p_dmc.core.{module}", Path("p2p_dmc/core") / f"{module}.py", deletion)
        sys.meta_path.insert(0, Finder(loader))
    generate = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=generate
    )
    hypothesis.settings.load_profile("mutants")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def killed_by(groups: Sequence[Sequence[str]], world_seeds: int) -> str | None:
    """What notices first: of one group of test files after the other, then of the random world."""
    for group in groups:
        found = tested(group) if group else None
        if found is not None:
            return found
    return lived(world_seeds) if world_seeds else None


def attempt(
    module: str,
    deletion: Deletion | None,
    groups: Sequence[Sequence[str]],
    world_seeds: int,
    cpu_s: int,
) -> tuple[bool, str]:
    """(noticed, by what), from a child that is gone afterwards."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        try:
            prepare(module, deletion, cpu_s)
            found = killed_by(groups, world_seeds)
        except BaseException as error:  # noqa: BLE001 - the same, and the child ends
            found = type(error).__name__
        os.write(write_fd, (SURVIVED if found is None else found).encode())
        os._exit(0)
    os.close(write_fd)
    said = heard(read_fd, WAIT * cpu_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if said is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return True, "the deadline"
    return said != SURVIVED, "" if said == SURVIVED else said or "it died"


def heard(fd: int, deadline_s: float) -> str | None:
    """All that is said until the other end closes; None when that takes too long."""
    end, data = time.monotonic() + deadline_s, b""
    with contextlib.closing(os.fdopen(fd, "rb", buffering=0)) as file:
        while True:
            if not select.select([file], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            chunk = file.read(65536)
            if not chunk:
                return data.decode()
            data += chunk


# --- which tests concern a module ------------------------------------------------------------------------


def reach(path: Path, seen: set[Path] | None = None) -> set[Path]:
    """The files of core/ and of the tests that a file imports, directly or not."""
    seen = set() if seen is None else seen
    for name in imported(path.read_text()):
        other = Path(*name.split(".")).with_suffix(".py")
        if name.startswith(("p2p_dmc.core.", "tests.")) and other.is_file() and other not in seen:
            seen.add(other)
            reach(other, seen)
    return seen


def concerned(module: str) -> tuple[list[str], bool]:
    """Test files that import the module, and whether the random world does."""
    target = Path("p2p_dmc/core") / f"{module}.py"
    files = [*sorted(Path("tests/core").glob("test_*.py")), Path("tests/sim/test_scenarios.py")]
    chosen = [str(path) for path in files if path.is_file() and target in reach(path)]
    world = Path("tests/sim/schedule.py")
    return chosen, world.is_file() and target in reach(world)


@dataclass
class Killers:
    """What runs against the mutants of one module, and the processor time that it takes on the original."""

    files: list[str]
    world_seeds: int
    seconds: float
    last: dict[str, str] = field(default_factory=dict)
    """Per function, the file that noticed a mutant of it last: that one goes first."""

    @classmethod
    def of(cls, module: str, files: Sequence[str], world_seeds: int) -> Killers:
        """Each is tried on the original first; SystemExit if it fails there."""
        found, world = concerned(module)
        took: dict[str, float] = {}
        for name in [*(files or found), *([WORLD] if world and world_seeds else [])]:
            began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            tests, seeds = ([], world_seeds) if name == WORLD else ([name], 0)
            noticed, by = attempt(module, None, [tests], seeds, 600)
            if noticed:
                raise SystemExit(f"{name} fails on {module}.py as it is: {by}")
            took[name] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
        seeds = world_seeds if WORLD in took else 0
        return cls(sorted(set(took) - {WORLD}, key=took.__getitem__), seeds, sum(took.values()))

    def run(self, module: str, deletion: Deletion) -> Verdict:
        first = self.last.get(deletion.function, self.files[0])
        groups = [[first], [name for name in self.files if name != first]]
        cpu_s = round(SLOWER * self.seconds) + GRACE_S
        killed, by = attempt(module, deletion, groups, self.world_seeds, cpu_s)
        file = by.partition("::")[0]
        if file in self.files:
            self.last[deletion.function] = file
        return {
            "at": f"p2p_dmc/core/{module}.py:{deletion.line}",
            "function": deletion.function,
            "condition": deletion.condition,
            "kind": deletion.kind,
            "killed": killed,
            "by": by,
        }


# --- the whole -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[None]:
    """What is tested does not change under way, and nothing is written to the working tree."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        skip = shutil.ignore_patterns("__pycache__", "results")
        for name in ("p2p_dmc", "tests/core", "tests/sim"):
            shutil.copytree(ROOT / name, Path(folder, name), ignore=skip)
        for name in ("pyproject.toml", "tests/__init__.py"):
            shutil.copy(ROOT / name, Path(folder, name))
        os.chdir(folder)
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = False  # what does not change is compiled once
        try:
            yield
        finally:
            os.chdir(ROOT)
            sys.path.remove(folder)


def digest(module: str) -> str:
    return hashlib.blake2b(Path(f"p2p_dmc/core/{module}.py").read_bytes(), digest_size=8).hexdigest()


@dataclass
class Report:
    """All verdicts so far, by module and by the deletion's key."""

    path: Path | None
    digests: dict[str, str] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)

    def load(self) -> None:
        if self.path is not None and self.path.is_file():
            stored = json.loads(self.path.read_text())
            self.digests, self.verdicts = stored["digests"], stored["verdicts"]

    def save(self) -> None:
        if self.path is None:
            return
        lines = []
        for module in sorted(self.verdicts):
            entries = [f"{json.dumps(key)}: {json.dumps(v)}" for key, v in self.verdicts[module].items()]
            lines.append(json.dumps(module) + ": {\n" + ",\n".join(entries) + "\n}")
        text = '{"digests": ' + json.dumps(self.digests, sort_keys=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(text + ',\n"verdicts": {\n' + ",\n".join(lines) + "\n}}\n")
        scratch.replace(self.path)

    def begin(self, module: str, found: Sequence[Deletion]) -> list[Deletion]:
        """What is still to do of all of a module: everything if it changed, else what is not known to be noticed."""
        known = self.verdicts.get(module, {}) if self.digests.get(module) == digest(module) else {}
        keys = {deletion.key for deletion in found}
        self.digests[module] = digest(module)
        self.verdicts[module] = known = {key: verdict for key, verdict in known.items() if key in keys}
        return [deletion for deletion in found if not known.get(deletion.key, {}).get("killed")]

    def summary(self) -> dict[str, Any]:
        """See the module's docstring."""
        flat = [(module, key, v) for module, book in self.verdicts.items() for key, v in book.items()]
        fields = ("at", "function", "condition", "kind")
        wrong = [f"{m}.py {key} was noticed" for m, key, v in flat if v["killed"] and (m, key) in EQUIVALENT]
        return {
            "mutants": len(flat),
            "killed": sum(v["killed"] for _, _, v in flat),
            "by_chance": [v for _, _, v in flat if v["killed"] and v["by"].startswith(WORLD)],
            "excused": sum(not v["killed"] and (m, key) in EQUIVALENT for m, key, v in flat),
            "survivors": [
                {name: v[name] for name in fields}
                for m, key, v in flat
                if not v["killed"] and (m, key) not in EQUIVALENT
            ],
            "wrong": wrong + unknown_entries(),
        }


def unknown_entries() -> list[str]:
    """Entries of the list of equivalent mutants that name no condition of the cores."""
    keys = {
        (module, deletion.key)
        for module in MODULES
        for deletion in deletions((ROOT / f"p2p_dmc/core/{module}.py").read_text())
    }
    return [f"{module}.py {key} does not exist" for module, key in sorted(set(EQUIVALENT) - keys)]


def explore(args: argparse.Namespace, report: Report) -> None:
    end = time.monotonic() + (QUICK_S if args.quick else float("inf"))
    todo: list[tuple[str, Deletion]] = []
    for module in args.modules:
        found = report.begin(module, deletions(Path(f"p2p_dmc/core/{module}.py").read_text()))
        todo += [(module, deletion) for deletion in found if args.only in deletion.function]
    if args.quick:
        random.Random(args.seed).shuffle(todo)
    else:  # those take longest, and their end is known
        todo.sort(key=lambda item: (item[0], item[1].key) in EQUIVALENT)
    killers: dict[str, Killers] = {}
    for number, (module, deletion) in enumerate(todo, 1):
        if time.monotonic() > end:
            break
        if module not in killers:
            killers[module] = Killers.of(module, args.tests, args.world)
        verdict = killers[module].run(module, deletion)
        report.verdicts[module][deletion.key] = verdict
        if not verdict["killed"]:
            excuse = EQUIVALENT.get((module, deletion.key))
            print(f"{verdict['at']} {deletion.key}: {excuse or 'NOTHING NOTICES'}", file=sys.stderr)
        if number % 10 == 0:
            report.save()
            print(f"{number} of {len(todo)}", file=sys.stderr)


def words(result: dict[str, Any]) -> str:
    lines = [f"{v['at']} {v['function']}: {v['condition']} [{v['kind']}]" for v in result["survivors"]]
    chance = len(result["by_chance"])
    lines += result["wrong"]
    lines.append(
        f"{result['mutants']} conditions deleted, {result['killed']} noticed ({chance} only by the random world), "
        f"{result['excused']} excused, {len(result['survivors'])} survive"
    )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=list(MODULES), metavar="NAME")
    parser.add_argument("--only", default="", help="functions whose qualified name contains this")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="FILE", help="instead of those that concern it"
    )
    parser.add_argument("--world", type=int, default=60, metavar="SEEDS", help="of the random world; 0: none")
    parser.add_argument(
        "--quick", action="store_true", help="a sample, in at most two minutes; keeps nothing"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--fresh", action="store_true", help="forget what is known")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the verdicts are kept")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.tests = [str(Path(name).resolve()) for name in args.tests]
    report = Report(None if args.quick else args.out.resolve())
    if not args.fresh:
        report.load()
    import hypothesis  # noqa: F401 - paid for once: the children are forks
    import msgpack  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401

    gc.freeze()
    with copy_of_the_tree():
        explore(args, report)
    report.save()
    result = report.summary()
    print(json.dumps(result) if args.json else words(result))
    return 1 if result["survivors"] or result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
