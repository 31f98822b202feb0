"""A run's promises and settings on disk, and how a difference is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.agent.checkpoints import write_checkpoint
from p2p_dmc.agent.run_files import (
    RunRecord,
    boot_for,
    compression_of,
    fingerprint,
    fingerprint_digest,
    first_difference,
    load_names,
    load_record,
    load_run,
    own_record,
    payload_spec,
    save_record,
    save_run,
)
from p2p_dmc.agent.state import SlotPool
from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.core.agreement_messages import GivenUp, MemberId, Promises, Replaced, ViewRef
from p2p_dmc.core.compression import SETTINGS, Compression
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire.trainer_messages import ParameterSpec, RunReady
from tests.agent.helpers import DATASET, NUMEL, PARAMETERS, member, state, surroundings
from tests.wire.values import any_of

VIEW = ViewRef(view_epoch=3, members=(member(1), member(2, boot=7)))
PROMISES = Promises(
    n=9,
    history=b"h" * 16,
    base=VIEW,
    known=None,
    courted=b"c" * 16,
    replaced=(Replaced(history=b"o" * 16, lineage=(2, 5), evicted=True),),
    pending=(VIEW, replace(VIEW, view_epoch=4)),
    given_up=(GivenUp(history=b"g" * 16, pending=(VIEW,)),),
    version=12,
)
RECORD = RunRecord(promises=PROMISES, closed=True, boot=5)


@settings(max_examples=40, deadline=None)
@given(promises=any_of(Promises), closed=st.booleans(), boot=st.integers(0, 2**62))
def test_records_there_and_back(
    tmp_path_factory: pytest.TempPathFactory, promises: Promises, closed: bool, boot: int
) -> None:
    folder = tmp_path_factory.mktemp("run") / "deep"
    record = RunRecord(promises=promises, closed=closed, boot=boot)
    save_record(folder, record)
    assert load_record(folder) == record


def test_who_never_took_part_has_no_record(tmp_path: Path) -> None:
    assert load_record(tmp_path) is None and load_record(tmp_path / "nowhere") is None


def damaged(**facts: Any) -> str:
    """The record's file with some entries changed; None: left out."""
    whole: dict[str, Any] = {
        "n": 9,
        "history": "68" * 16,
        "courted": "",
        "base": [3, [["a", 1]]],
        "known": None,
        "pending": [[3, [["a", 1]]]],
        "closed": True,
        "boot": 5,
    }
    changed = whole | facts
    return json.dumps({name: value for name, value in changed.items() if value != "left out"})


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "agreement.json").write_text(damaged())
    record = load_record(tmp_path)
    one = ViewRef(view_epoch=3, members=(MemberId(peer_id="a", boot=1),))
    assert record == RunRecord(
        promises=Promises(n=9, history=b"h" * 16, base=one, known=None, pending=(one,)), closed=True, boot=5
    )


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "null", "[]", "{}", "7", '"x"', damaged()[:-1], damaged()[: len(damaged()) // 2],
        *(damaged(**{name: "left out"}) for name in json.loads(damaged())),
        damaged(n="x"), damaged(n=-1), damaged(n=None), damaged(history="zz"), damaged(history=5), damaged(courted=5),
        damaged(history="68"), damaged(base=[3]), damaged(base=[3, [["a"]]]), damaged(base=[3, []]),
        damaged(base={"x": 1}), damaged(base=7), damaged(pending=7), damaged(pending=[7]),
        damaged(pending=[[3, [["b", 1], ["a", 1]]]]), damaged(pending=[[3, [["", 1]]]]), damaged(boot="x"),
        damaged(version="x"), damaged(version=-1), damaged(version=None),
    ],
)  # fmt: skip
def test_a_damaged_record_is_an_error_and_never_no_record(tmp_path: Path, text: str) -> None:
    """To go on without it could break a promise."""
    (tmp_path / "agreement.json").write_text(text)
    with pytest.raises(UserError, match=r"agreement\.json is damaged; use another --home"):
        load_record(tmp_path)


def test_a_record_replaces_the_one_before(tmp_path: Path) -> None:
    save_record(tmp_path, RECORD)
    save_record(tmp_path, replace(RECORD, closed=False, boot=6))
    assert load_record(tmp_path) == replace(RECORD, closed=False, boot=6)
    assert [p.name for p in tmp_path.iterdir()] == ["agreement.json"]


def test_facts_of_a_run_add_up(tmp_path: Path) -> None:
    assert load_run(tmp_path) == {}
    save_run(tmp_path / "r", fingerprint=[["epochs", "3"]], finished=None)
    save_run(tmp_path / "r", finished={"digest": "ab"})
    assert load_run(tmp_path / "r") == {"fingerprint": [["epochs", "3"]], "finished": {"digest": "ab"}}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_facts_that_cannot_be_read_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert load_run(tmp_path) == {}
    save_run(tmp_path, a=1)
    assert load_run(tmp_path) == {"a": 1}


# -- settings ---------------------------------------------------------------------------------------------------------

READY = RunReady(
    dataset=DATASET,
    seed=1,
    epochs=3,
    batch_size=8,
    parameters=PARAMETERS,
    tau_policy=TauPolicy(kind="fixed", tau0=4).to_bytes(),
    outer="average",
)


def settings_of(ready: RunReady = READY, name: str = "digits", **facts: str) -> tuple[tuple[str, str], ...]:
    given_ = {"quorum": "majority", "backend": "auto", "on_lost": "wait"} | facts
    return fingerprint(ready, name, **given_)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (settings_of(replace(READY, epochs=4)), "epochs is 4 here and 3 in the run"),
        (settings_of(replace(READY, seed=2)), "seed is 2 here and 1 in the run"),
        (
            settings_of(replace(READY, dataset=b"e" * 16)),
            f"data set is digits {(b'e' * 6).hex()} here and digits ",
        ),
        (settings_of(name="letters"), "data set is letters"),
        (settings_of(quorum="strict"), "quorum is strict here and majority in the run"),
        (settings_of(backend="nccl"), "backend is nccl here and auto in the run"),
        (settings_of(replace(READY, outer="nesterov")), "outer optimizer is nesterov here and average"),
        (settings_of(replace(READY, compress="int8")), "compression is int8 here and none in the run"),
        (
            settings_of(replace(READY, tau_policy=TauPolicy(kind="adacomm", tau0=4, t0_ms=1500).to_bytes())),
            "tau is AdaComm(basic, tau0=4, t0=1.5 s, tau_max=512, lr_ratio=False) here and 4 in the run",
        ),
        (settings_of(replace(READY, parameters=PARAMETERS[:1])), "number of parameters is 1 here and 2"),
        (
            settings_of(replace(READY, parameters=(replace(PARAMETERS[0], shape=(3, 2)), PARAMETERS[1]))),
            "parameter weight is 3x2 float32 here and 2x3 float32 in the run",
        ),
        (
            settings_of(replace(READY, parameters=(PARAMETERS[0], replace(PARAMETERS[1], dtype="float16")))),
            "parameter bias is scalar float16 here and scalar float32 in the run",
        ),
        (
            settings_of(replace(READY, parameters=(PARAMETERS[0], replace(PARAMETERS[1], name="b")))),
            "parameter bias is missing here and scalar float32 in the run",
        ),
        ((*settings_of(), ("new setting", "7")), "new setting is 7 here and missing in the run"),
        (settings_of(replace(READY, epochs=4, seed=2)), "epochs"),  # the first one
    ],
)
def test_the_first_difference_is_named(theirs: tuple[tuple[str, str], ...], said: str) -> None:
    difference = first_difference(settings_of(), theirs)
    assert difference is not None and difference.startswith(said)
    assert fingerprint_digest(theirs) != fingerprint_digest(settings_of())


def test_a_run_that_said_nothing_of_compression_has_none() -> None:
    before = tuple(pair for pair in settings_of() if pair[0] != "compression")
    assert first_difference(before, settings_of()) is None
    assert first_difference(before, settings_of(replace(READY, compress="topk"))) == (
        "compression is topk here and none in the run"
    )


def test_payloads_that_travel_otherwise_are_others() -> None:
    specs = {payload_spec(PARAMETERS, compress) for compress in SETTINGS}
    assert len(specs) == len(SETTINGS) and payload_spec(PARAMETERS) in specs
    assert compression_of(replace(READY, compress="auto")) == Compression(setting="auto", parameters=7)
    with pytest.raises(RemoteProtocolError, match="int3"):
        compression_of(replace(READY, compress="int3"))


def test_batch_size_may_differ() -> None:
    same = settings_of(replace(READY, batch_size=99))
    assert first_difference(settings_of(), same) is None
    assert (
        fingerprint_digest(same) == fingerprint_digest(settings_of()) and len(fingerprint_digest(same)) == 8
    )


def test_the_order_of_parameters_is_told_apart_where_it_matters() -> None:
    """The flat buffer is one thing, the settings in words another."""
    swapped = PARAMETERS[::-1]
    assert payload_spec(PARAMETERS) != payload_spec(swapped) and len(payload_spec(PARAMETERS)) == 16
    assert payload_spec(PARAMETERS) == payload_spec(list(PARAMETERS))
    specs = [
        (ParameterSpec(name="a", shape=(2, 3), dtype="float32"),),
        (ParameterSpec(name="a", shape=(3, 2), dtype="float32"),),
        (ParameterSpec(name="a", shape=(2, 3), dtype="float16"),),
        (ParameterSpec(name="b", shape=(2, 3), dtype="float32"),),
        (),
    ]
    assert len({payload_spec(s) for s in specs}) == len(specs)


# -- closed, and the state with which it was ---------------------------------------------------------------------------


def close(folder: Path, tmp_path: Path) -> Path:
    """A run that was stopped at round 8 of view 3; its newest checkpoint."""
    slots = SlotPool(surroundings(tmp_path / "elsewhere").services.memory, NUMEL)
    held = state(slots, (3, 7), 1.5, Ledger.start(DATASET, [10, 4], 1, 2))
    write_checkpoint(folder, held, PARAMETERS, PROMISES.history, False, 3)
    at_end = replace(held, ref=replace(held.ref, lineage=(3, 8)))
    save_record(folder, RECORD)
    return write_checkpoint(folder, at_end, PARAMETERS, PROMISES.history, True, 3)


def test_a_peer_that_closed_the_run_keeps_its_vote(tmp_path: Path) -> None:
    close(tmp_path / "run", tmp_path)
    record = own_record(tmp_path / "run")
    assert record == RECORD and boot_for(record, 9, lambda: 77) == 5


@pytest.mark.parametrize("damage", ["a byte", "gone", "meta"])
def test_one_whose_last_state_is_damaged_has_forgotten_it_and_has_none(tmp_path: Path, damage: str) -> None:
    """It resumes with what is older. A majority of such peers would undo what another one still holds."""
    newest = close(tmp_path / "run", tmp_path)
    if damage == "a byte":
        path = newest / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    elif damage == "gone":
        shutil.rmtree(newest)
    else:
        (newest / "meta.json").unlink()
    record = own_record(tmp_path / "run")
    assert record == replace(RECORD, closed=False) and boot_for(record, 9, lambda: 77) == 9
    assert own_record(tmp_path / "nowhere") is None


def test_names_of_peers_that_are_gone(tmp_path: Path) -> None:
    assert load_names(tmp_path) == {}
    save_run(tmp_path, names={"a" * 32: "alice"})
    assert load_names(tmp_path) == {"a" * 32: "alice"}
    save_run(tmp_path, names=["nonsense"])
    assert load_names(tmp_path) == {}
