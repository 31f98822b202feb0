"""A run on a mixture, on one peer: which of its shards are here, what the run says of it, and who is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.agent.datasets import DataService
from p2p_dmc.agent.entering import run_meta
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.run_data import RunData
from p2p_dmc.agent.run_files import KnownPart, RunOptions, fingerprint, first_difference, parts_of, save_run
from p2p_dmc.agent.view_opening import report_given_up
from p2p_dmc.agent.work import decode_payload, from_bitmap
from p2p_dmc.core.membership_messages import MAX_META_BYTES
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import MAX_PARTS, Mixture, Part
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire.messages import PeerMeta, decode_meta, encode_meta
from p2p_dmc.wire.trainer_messages import InitialWritten, TrainerRefused, WriteInitial
from tests.agent.helpers import Around, surroundings
from tests.agent.helpers import run_meta as some_meta
from tests.agent.test_run_files import READY as PLAIN
from tests.data.test_mixture import CODE, MIXED, WEB


class Here:
    """The data sets of one peer, as `DataService` would tell of them."""

    def __init__(self, *manifests: Manifest) -> None:
        self.known = {m.digest: m for m in manifests}
        self.manifest = self.known.get
        self.there: dict[bytes, frozenset[int]] = {}
        self.asked: list[tuple[bytes, int]] = []
        self.full = False
        self.store = SimpleNamespace(has=lambda dataset, shard: False)

    def held(self, dataset: bytes) -> frozenset[int]:
        return self.there.get(dataset, frozenset())

    reachable = held

    def usable(self, dataset: bytes, shard: int) -> bool:
        self.asked.append((dataset, shard))
        return shard in self.held(dataset)

    def want(self, dataset: bytes, shard: int, then: Callable[[], None]) -> None:
        self.asked.append((dataset, shard))
        then()


READY = replace(
    PLAIN, dataset=MIXED.digest, parts=tuple((part.manifest.digest, part.passes) for part in MIXED.parts)
)


def run_on(tmp_path: Path, here: Here) -> tuple[Run, Around, list[Any]]:
    around = surroundings(tmp_path, data=cast(DataService, here))
    run = Run("r", RunOptions(), around.services)
    told: list[Any] = []
    run.desk.connected(told.append)
    return run, around, told


# -- shards -----------------------------------------------------------------------------------------------------------


def test_a_shard_of_the_mixture_is_the_one_that_it_stands_for() -> None:
    here = Here(WEB, CODE)
    data = RunData(cast(DataService, here), MIXED)
    here.there = {CODE.digest: frozenset({1}), WEB.digest: frozenset({0})}
    assert data.held() == data.reachable() == {1, 3, 5, 6}
    assert [data.usable(shard) for shard in range(9)] == [shard in data.held() for shard in range(9)]
    assert here.asked == [(CODE.digest, 0), (CODE.digest, 1)] * 3 + [(WEB.digest, i) for i in range(3)]
    came: list[int] = []
    data.want(4, lambda: came.append(4))
    assert came == [4] and here.asked[-1] == (CODE.digest, 0)
    here.full = True
    assert data.full


def test_what_can_be_reached_is_made_anew_only_when_it_changes() -> None:
    here = Here(WEB, CODE)
    here.there = {CODE.digest: frozenset({1})}
    data = RunData(cast(DataService, here), MIXED)
    first = data.reachable()
    assert data.reachable() is first
    here.there[WEB.digest] = frozenset({2})
    assert data.reachable() == first | {8}
    here.there[CODE.digest] = frozenset({0})
    assert data.reachable() == {0, 2, 4, 8}


def test_a_data_set_by_itself_costs_nothing() -> None:
    here = Here(WEB)
    here.there = {WEB.digest: frozenset({1, 2})}
    data = RunData(cast(DataService, here), Mixture.of(WEB))
    assert data.reachable() is here.there[WEB.digest] and data.held() is here.there[WEB.digest]


# -- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_on_a_mixture_begins(tmp_path: Path) -> None:
    here = Here(WEB, CODE)
    here.there = {WEB.digest: frozenset({2})}
    run, _, told = run_on(tmp_path, here)
    run.desk.run_ready(READY)
    assert isinstance(told[-1], WriteInitial)
    run.desk.initial_written(InitialWritten(digest=b"d" * 16))
    ledger = run.ledger()
    assert (ledger.dataset_digest, ledger.counts) == (MIXED.digest, MIXED.sample_counts)
    assert run_meta(run).datasets == (CODE.digest, WEB.digest)
    payload = decode_payload(run._payload())
    assert from_bitmap(payload.holdings, 9) == from_bitmap(payload.reachable, 9) == {8}
    assert run.shard_here(8) and not run.shard_here(0)
    assert parts_of(run.desk.fingerprint) == (
        KnownPart("code", CODE.digest.hex()[:12], 3), KnownPart("web", WEB.digest.hex()[:12], 1),
    )  # fmt: skip


def test_given_up_samples_are_named_with_their_data_set(tmp_path: Path) -> None:
    run, around, _ = run_on(tmp_path, Here(WEB, CODE))
    run.desk.run_ready(READY)
    report_given_up(run, [[0, 3, 0, 1]])
    [line] = around.named("given_up")
    [key] = line["keys"]
    assert key.startswith(f"code: {CODE.shard_digests[1].hex()[:12]}#")


def test_parts_that_are_not_known_here(tmp_path: Path) -> None:
    run, _, told = run_on(tmp_path, Here(WEB))
    run.desk.run_ready(READY)
    assert told == [
        TrainerRefused(
            reason=f"data set {CODE.digest.hex()} is not known here; seed it, or join a peer that has it"
        )
    ]


def test_a_trainer_that_mixes_otherwise_than_it_says(tmp_path: Path) -> None:
    run, _, _ = run_on(tmp_path, Here(WEB, CODE))
    with pytest.raises(RemoteProtocolError, match="another digest"):
        run.desk.run_ready(replace(READY, dataset=WEB.digest))


def test_who_resumes_with_other_weights_is_refused_in_one_line(tmp_path: Path) -> None:
    run, _, told = run_on(tmp_path, Here(WEB, CODE))
    run.desk.run_ready(READY)
    save_run(run.folder, fingerprint=[list(pair) for pair in run.desk.fingerprint])
    other = Mixture((Part(WEB, 2), Part(CODE, 3)))
    again, _, told = run_on(tmp_path, Here(WEB, CODE))
    parts = tuple((part.manifest.digest, part.passes) for part in other.parts)
    again.desk.run_ready(replace(READY, dataset=other.digest, parts=parts))
    assert told == [
        TrainerRefused(
            reason=f"run 'r': data set is 3 x code + 2 x web {other.digest.hex()[:12]} here and "
            f"3 x code + 1 x web {MIXED.digest.hex()[:12]} in the run; use the same, or another --run name"
        )
    ]
    same, _, told = run_on(tmp_path, Here(WEB, CODE))
    same.desk.run_ready(READY)
    assert isinstance(told[-1], WriteInitial)


# -- what is said of it -----------------------------------------------------------------------------------------------


def settings_of(mixture: Mixture) -> Any:
    ready = replace(READY, dataset=mixture.digest)
    return fingerprint(ready, mixture.name, "majority", "auto", "wait", KnownPart.all_of(mixture))


def test_a_fingerprint_tells_the_parts_whatever_they_are_called() -> None:
    odd = Mixture((Part(replace(WEB, name="a x b + 2 x c"), 2), Part(replace(CODE, name="two words"), 1)))
    assert parts_of(settings_of(odd)) == KnownPart.all_of(odd)
    alone = Mixture.of(replace(WEB, name="2 x two words"))
    assert parts_of(settings_of(alone)) == (KnownPart("2 x two words", alone.digest.hex()[:12], 1),)
    assert parts_of(()) == ()
    newer = Mixture((Part(WEB, 1), Part(replace(CODE, seed=9), 3)))
    difference = first_difference(settings_of(MIXED), settings_of(newer))
    assert difference is not None and difference.startswith("data set is 3 x code + 1 x web ")


def test_all_peers_are_told_the_versions_and_there_is_room_for_that() -> None:
    digests = b"".join(bytes([i]) * 16 for i in range(MAX_PARTS))
    full = some_meta(dataset=digests, history=b"h" * 16, replaced=(b"r" * 16,) * 4, name="n" * 64)
    assert full.datasets == tuple(bytes([i]) * 16 for i in range(MAX_PARTS))
    runs = tuple(replace(full, name=f"{i}" * 64) for i in range(8))
    packed = encode_meta(PeerMeta(weight=1, runs=runs))
    told = decode_meta(packed)
    assert told is not None and len(packed) <= MAX_META_BYTES
    assert 1 < len(told.runs) < 8 and told.runs == runs[-len(told.runs) :]
    assert some_meta(dataset=b"").datasets == () and some_meta(dataset=b"d" * 16).datasets == (b"d" * 16,)
    for wrong in (digests + b"d" * 16, b"d" * 15, b"d" * 17):
        with pytest.raises(ValueError, match="data set"):
            some_meta(dataset=wrong)
