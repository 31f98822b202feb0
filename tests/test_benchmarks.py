"""The programs under benchmarks/: their command line, and that vs_ddp's checks see what they are for."""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "bench")


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def vs_ddp() -> ModuleType:
    return importlib.import_module("vs_ddp")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_there_without_torch(name: str) -> None:
    script = (
        f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({str(FOLDER / (name + '.py'))!r}, run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("False\n")
    for word in ("--quick", "--seed", "--json", "--out", f"benchmarks/{name}.py", "Keys:", "violations"):
        assert word in shown, word


@pytest.mark.parametrize("name", PROGRAMS)
def test_common_options(name: str) -> None:
    words = ["--quick", "--seed", "7", "--json", "--out", "x.json", "--no-such-option"]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.rstrip().endswith("error: unrecognized arguments: --no-such-option")


def test_result_is_written_whole_and_violations_decide(tmp_path: Path, capsys: Any) -> None:
    bench = importlib.import_module("bench")
    out = tmp_path / "results" / "x.json"
    options = bench.parser("doc", "x").parse_args(["--json", "--seed", "3", "--out", str(out)])
    result = {**bench.conditions(), "figure": 1.5}
    assert bench.finish(options, result, []) == 0
    written = json.loads(out.read_text())
    assert written == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (written["figure"], written["seed"], written["quick"], written["violations"]) == (
        1.5,
        3,
        False,
        [],
    )
    assert {"command", "torch", "cores", "date"} <= written.keys()
    assert bench.finish(options, result, ["something differs"]) == 1
    assert json.loads(out.read_text())["violations"] == ["something differs"]
    assert [path.name for path in out.parent.iterdir()] == ["x.json"]


def test_without_what_it_needs_one_line(capfd: Any) -> None:
    bench = importlib.import_module("bench")

    def fails(_: object) -> int:
        raise bench.BenchError("no hosts: use root")

    with pytest.raises(SystemExit, match="no hosts: use root"):
        bench.run(fails)


def test_vs_ddp_refuses_what_makes_no_sense(vs_ddp: ModuleType) -> None:
    bench = importlib.import_module("bench")
    for wrong in (["--steps", "9", "--epochs", "2"], ["--tau", "0"], ["--batch-size", "-1"]):
        with pytest.raises(bench.BenchError, match="--"):
            vs_ddp.parse(wrong)
    assert vs_ddp.parse(["--quick"]).steps < vs_ddp.parse([]).steps


# --- the checks of vs_ddp --------------------------------------------------------------------------------

PARAMETERS = 1000


def trained(vs_ddp: ModuleType) -> Any:
    """Four peers, two epochs of eight samples in two shards, one round each epoch, all as it should be."""
    records = {
        f"h{i + 1}": {
            "begin_s": 10.0 + i / 10,
            "end_s": 12.0 + i / 10,
            "bytes_begin": [500, 500],
            "bytes_end": [13_500, 13_500],
            "steps": [[10.5 + i / 10, 2, 2.0], [11.5, 2, 1.0]],
            "seen": [[epoch, 2 * i + j] for epoch in range(2) for j in range(2)],
            "digest": "d",
            "parameters": PARAMETERS,
        }
        for i in range(4)
    }
    records["h1"] |= {"test_loss": 0.5, "test_accuracy": 0.9}
    line = {
        "view_epoch": 1,
        "tau": 1,
        "members": 4,
        "bytes_sent": 6000,
        "compute_s": 1,
        "comm_s": 1,
        "wait_s": 0,
    }
    counted = [[[[0, 0, 2]], [[0, 2, 5]], [[1, 0, 3]]], [[[1, 0, 3]], [[0, 0, 5]]]]
    lines = [line | {"round": e + 1, "epoch": e, "digest": f"d{e}", "counted": counted[e]} for e in range(2)]
    return vs_ddp.Trained(
        name="fixed",
        started_s=5.0,
        records=records,
        sent_all=[14_000] * 4,
        metrics={host: copy.deepcopy(lines) for host in records},
        events={host: [{"event": "started"}] for host in records},
        sample_counts=(5, 3),
    )


def violations(vs_ddp: ModuleType, contestant: Any) -> list[str]:
    found: list[str] = vs_ddp.check_digests(contestant)
    found += vs_ddp.check_samples(contestant, 8, 2)
    found += vs_ddp.check_bytes(contestant, PARAMETERS, 1_000_000)
    return found


def test_nothing_is_found_where_all_is_well(vs_ddp: ModuleType) -> None:
    assert violations(vs_ddp, trained(vs_ddp)) == []
    ddp = trained(vs_ddp)
    ddp.metrics, ddp.events = {}, {}
    assert violations(vs_ddp, ddp) == []


def set_in(*keys: Any) -> Any:
    """A change to a contestant: all but the last key lead to the place, the last is the value."""

    def change(contestant: Any) -> None:
        place = getattr(contestant, keys[0])
        for key in keys[1:-2]:
            place = place[key]
        place[keys[-2]] = keys[-1]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_in("records", "h3", "digest", "e"), "final parameters differ"),
        (set_in("metrics", "h2", 1, "digest", "e"), r"digests differ in rounds \[\(1, 2\)\]"),
        (set_in("records", "h4", "seen", [[0, 6], [0, 7], [1, 6]]), "15 of 16 samples were trained on"),
        (set_in("records", "h4", "seen", [[0, 6], [0, 7], [1, 6], [1, 7], [1, 0]]), "more than once"),
        (
            set_in("metrics", "h1", 0, "counted", [[[0, 0, 5]], [[1, 0, 2]]]),
            "h1: the ledger counts 15 samples",
        ),
        (set_in("metrics", "h1", 0, "counted", [[[0, 0, 5]], [[1, 0, 3]], [[1, 2, 3]]]), "counts 17 samples"),
        (set_in("records", "h1", "bytes_end", [14_501, 13_500]), "14001 bytes while training, 14000 in all"),
        (set_in("records", "h1", "bytes_end", [400, 13_500]), "-100 bytes while training"),
        (set_in("sent_all", 2, 11_999), "11999 bytes sent, 2 reductions need 12000"),
        (set_in("metrics", "h2", 0, "bytes_sent", 9000), "15000 bytes claimed, 14000 sent"),
        (set_in("records", "h2", "bytes_end", [13_500, 2_000_000]), "bytes received in 2.0 s"),
    ],
)
def test_each_violation_is_found(vs_ddp: ModuleType, change: Any, said: str) -> None:
    contestant = trained(vs_ddp)
    change(contestant)
    found = violations(vs_ddp, contestant)
    assert any(re.search(said, line) for line in found), found


def test_figures(vs_ddp: ModuleType) -> None:
    facts = vs_ddp.summary(trained(vs_ddp), 2)
    assert facts["seconds"] == pytest.approx(2.3)
    assert facts["s_per_step"] == pytest.approx(1.15)
    assert (facts["samples"], facts["rounds"], facts["sent_bytes"]) == (16, 2, [13_000] * 4)
    assert facts["loss"] == [[0.8, 2.0], [1.5, 1.0]]
    slow = facts | {"s_per_step": 2.3, "sent_bytes": [26_000] * 4, "loss": [[4.0, 1.5], [6.0, 1.0]]}
    results = {"ddp": slow, "fixed": facts, "adacomm": facts | {"loss": [[1.0, 1.2], [2.0, 1.1]]}}
    assert vs_ddp.ratios(results) == {
        "fixed": {"speed": 2.0, "bytes": 2.0, "time_to_loss": 4.0},
        "adacomm": {"speed": 2.0, "bytes": 2.0, "time_to_loss": 3.0},
    }
    shown = vs_ddp.report({"100mbit": results | {"ratios": vs_ddp.ratios(results)}})
    assert "adacomm" in shown and "2.0x" in shown


def test_images_are_a_function_of_the_seed(tmp_path: Path) -> None:
    images = importlib.import_module("contestants.images")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        images.write(tmp_path / name, 20, 5, seed, None)
    read = {
        name: [
            (str(p.relative_to(tmp_path / name)), p.read_bytes())
            for p in sorted((tmp_path / name).rglob("*.raw"))
        ]
        for name in "abc"
    }
    assert len(read["a"]) == 20 and all(len(data) == 28 * 28 for _, data in read["a"])
    assert read["a"] == read["b"] != read["c"]
    stored = np.load(tmp_path / "a" / "test.npz")
    assert stored["images"].shape == (5, 28, 28) and set(stored["labels"]) <= set(range(10))


# --- the checks of allreduce -----------------------------------------------------------------------------


def reduced() -> list[dict[str, Any]]:
    """What two members found of one megabyte."""
    one = {"seconds": [9.0, 0.2, 0.4], "around_s": [0.1, 0.1, 0.1], "digest": "d", "off": 1e-8}
    other = one | {"seconds": [1.0, 0.3, 0.1]}
    coded = {"seconds": [9.0, 0.1, 0.1], "around_s": [0.1, 0.1, 0.1], "digest": "e", "off": 0.007}
    return [{"1": {"plain": one, "int8": coded}}, {"1": {"plain": other, "int8": dict(coded)}}]


def test_allreduce_takes_the_slowest_and_leaves_the_warm_up_out() -> None:
    allreduce = importlib.import_module("allreduce")
    ways, wrong = allreduce.figures(reduced(), "1", "100mbit")
    assert not wrong
    assert (ways["plain"]["seconds"], ways["plain"]["repeats"]) == (0.35, 2)
    assert (ways["int8"]["of_plain"], ways["plain"]["of_plain"]) == (3.5, 1.0)
    assert ways["ring_bound_s"] == 0.08
    assert allreduce.figures(reduced(), "1", "loopback")[0]["ring_bound_s"] is None
    assert allreduce.repeats_of(400, 8, 100_000_000, 30.0) == 1 < allreduce.repeats_of(1, 2, None, 30.0)


@pytest.mark.parametrize(
    ("fault", "said"),
    [({"digest": "x"}, "different bits"), ({"off": 0.5}, "off the mean"), ({"off": float("nan")}, "nan off")],
)
def test_allreduce_names_what_is_wrong(fault: dict[str, Any], said: str) -> None:
    allreduce = importlib.import_module("allreduce")
    found = reduced()
    found[1]["1"]["int8"] |= fault
    (line,) = allreduce.figures(found, "1", "loopback")[1]
    assert line.startswith("1 MB, int8") and said in line
