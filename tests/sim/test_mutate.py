"""The deletion of conditions, and that the script notices a guard which no test looks at."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.conditions import deletions, without
from tests.sim.mutate import MODULES, ROOT, Report, digest, unknown_entries

SOURCE = '''
if TYPE_CHECKING:
    import random

def decides(a: int, b: int | None) -> bool:
    """Not a condition: a and b."""
    assert a > 0
    while a and not b or a:
        found = [x for x in range(a) if x != 3]
    match found:
        case [1] if a < b < 3:
            return a
    total = a or 7
    return total
'''


def test_every_kind_of_condition_is_found() -> None:
    found = [deletion.key for deletion in deletions(SOURCE)]
    assert found == [
        "decides: a [dropped]",
        "decides: a [dropped] #2",
        "decides: a and not b [dropped]",
        "decides: a and not b or a [false]",
        "decides: a and not b or a [true]",
        "decides: not b [dropped]",
        "decides: x != 3 [false]",
        "decides: x != 3 [true]",
        "decides: a < b < 3 [false]",
        "decides: a < b < 3 [true]",
        "decides: a < b [dropped]",
        "decides: b < 3 [dropped]",
        "decides: case [1] [never]",
        "decides: a [false]",
        "decides: a [true]",
        "decides: 7 [dropped]",
        "decides: a [dropped] #3",
        "decides: total [false]",
        "decides: total [true]",
    ]


def line(kind: str, condition: str) -> str:
    """The line of SOURCE that this deletion changes, afterwards."""
    (deletion,) = [
        d for d in deletions(SOURCE) if (d.kind, d.condition, d.occurrence) == (kind, condition, 1)
    ]
    before, after = ast.unparse(ast.parse(SOURCE)), ast.unparse(without(SOURCE, deletion))
    (changed,) = set(after.splitlines()) - set(before.splitlines())
    return changed.strip()


def test_the_condition_is_gone_and_nothing_else() -> None:
    assert line("false", "x != 3") == "found = [x for x in range(a) if False]"
    assert line("true", "a and not b or a") == "while True:"
    assert line("dropped", "not b") == "while a or a:"
    assert line("dropped", "a and not b") == "while a:"
    assert line("dropped", "b < 3") == "case [1] if a < b:"
    assert line("never", "case [1]") == "case [1] if False:"
    assert line("dropped", "7") == "total = a"
    assert line("true", "total") == "return True"


@pytest.mark.parametrize("module", MODULES)
def test_every_deletion_in_the_cores_has_its_own_name(module: str) -> None:
    found = deletions((ROOT / f"p2p_dmc/core/{module}.py").read_text())
    assert len({deletion.key for deletion in found}) == len(found) > 10


def test_every_mutant_is_a_module_of_its_own() -> None:
    source = (ROOT / "p2p_dmc/core/adacomm.py").read_text()
    texts = set()
    for deletion in deletions(source):
        changed = without(source, deletion)
        compile(changed, "mutant", "exec", dont_inherit=True)
        texts.add(ast.unparse(changed))
    assert ast.unparse(ast.parse(source)) not in texts and len(texts) > 20


def test_the_list_of_equivalent_ones_names_conditions_that_exist() -> None:
    assert unknown_entries() == []


def test_what_is_known_is_kept_while_the_module_and_the_condition_stay() -> None:
    found = deletions((ROOT / "p2p_dmc/core/adacomm.py").read_text())
    noticed, survived = found[0].key, found[1].key
    known = {
        noticed: {"killed": True},
        survived: {"killed": False},
        "gone: a condition [true]": {"killed": False},
    }
    report = Report(None, {"adacomm": digest("adacomm")}, {"adacomm": known})
    assert report.begin("adacomm", found) == found[1:]
    assert report.verdicts["adacomm"] == {noticed: {"killed": True}, survived: {"killed": False}}
    report.digests["adacomm"] = "of another text"
    assert report.begin("adacomm", found) == found and report.verdicts["adacomm"] == {}


def test_a_missing_guard_is_noticed(tmp_path: Path) -> None:
    """A test of `Ledger._check_exists` that forgets positions beyond the shard's end."""
    test = tmp_path / "test_forgetful.py"
    test.write_text(
        """
import pytest
from p2p_dmc.core.ledger import Ledger, Stretch

def test_it() -> None:
    ledger = Ledger.start(b"d", [2], 0, 1)
    with pytest.raises(ValueError, match="no such samples"):
        ledger.skip([Stretch(shard=1, lo=0, hi=1)])
    done = ledger.skip([Stretch(shard=0, lo=0, hi=2)])
    with pytest.raises(ValueError, match="epochs are over"):
        done.skip([Stretch(shard=0, lo=0, hi=1)])
"""
    )
    command = [sys.executable, str(ROOT / "tests/sim/mutate.py"), "--quick", "--json", "--modules", "ledger"]
    command += ["--only", "_check_exists", "--tests", str(test)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["mutants"], result["killed"]) == (6, 5) and result["wrong"] == []
    (survivor,) = result["survivors"]
    assert (
        survivor["condition"] == "stretch.hi > self.counts[stretch.shard]" and survivor["kind"] == "dropped"
    )
