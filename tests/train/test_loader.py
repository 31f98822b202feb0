"""A loader is torch's DataLoader to its script, with and without workers; what it hands out is what is counted."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import track
from torch.utils.data import DataLoader, get_worker_info

import p2p_dmc as dmc
from p2p_dmc.data.mixture import Mixture
from p2p_dmc.errors import RunStopped, UserError
from p2p_dmc.train.leases import Batch
from p2p_dmc.train.loader import Loader
from p2p_dmc.train.source import Source
from p2p_dmc.wire import trainer_messages as tm
from tests.train import scripted
from tests.train.loading import Leader, Note, Trainer, lease_of, leave_out_earlier, number, numbers, workers
from tests.train.scripted import ScriptedAgent

WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 2, "prefetch_factor": 3},
    {"num_workers": 2, "persistent_workers": True},
]


@pytest.fixture
def agent(tmp_path: Path) -> ScriptedAgent:
    return ScriptedAgent(tmp_path)


@pytest.fixture
def note(tmp_path: Path) -> Note:
    return Note(tmp_path / "note")


@pytest.fixture(autouse=True)
def nobody_stays() -> Any:
    leave_out_earlier()
    yield
    assert workers() == []


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("batch_size", [3, 20])
def test_every_sample_once_in_the_ledgers_order(
    agent: ScriptedAgent, note: Note, options: dict[str, Any], batch_size: int
) -> None:
    def decode(sample: Any) -> float:
        note.write(f"{os.getpid()}")
        return number(sample)

    leader = Leader(epochs=2)
    one = Trainer(agent, batch_size, epochs=2, decode=decode, **options)
    with agent.play(leader):
        one.run()
    assert one.numbers == numbers(agent) + numbers(agent, epoch=1)
    assert sum(ready.samples for ready in leader.said) == 20
    assert all(ready.skipped == () for ready in leader.said)
    assert len(note.lines()) == 20  # nothing was prepared in vain, or twice
    others = Counter(note) - Counter({str(os.getpid()): 20})
    count = options.get("num_workers", 0)
    used = min(count, -(-10 // batch_size))
    if options.get("persistent_workers"):
        assert len(others) <= count
    else:
        assert len(others) == 2 * used  # an epoch has its own


def test_workers_go_on_with_what_is_expected(agent: ScriptedAgent, note: Note) -> None:
    """While the script stands at a round's barrier, or anywhere, the samples of the next lease are prepared."""
    prepared = threading.Event()

    def decode(sample: Any) -> float:
        note.write(sample["txt"].decode())
        return number(sample)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=2)
        flat = [
            (shard, at) for shard, count in enumerate(agent.manifest.sample_counts) for at in range(count)
        ]
        request = agent.expect(tm.LeaseRequest)
        assert (request.samples, request.ahead) == (4, 8)
        agent.send(lease_of(flat, 0, 4, 6))
        ready = agent.expect(tm.RoundReady)
        assert ready.samples == 4  # what only was prepared is not counted
        while len(note.lines()) < 10:
            pass
        prepared.set()
        agent.reduce(4, 4)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(lease_of(flat, 4, 10, 0))
        agent.reduce(agent.expect(tm.RoundReady).samples, 4)
        agent.complete()
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    one = Trainer(agent, 2, decode=decode, num_workers=2)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    assert prepared.is_set()
    assert one.numbers == numbers(agent)[: len(one.numbers)]
    assert sorted(map(float, note)) == sorted(numbers(agent))


@pytest.mark.parametrize("options", WORKERS)
def test_what_was_prepared_when_a_view_came_is_thrown_away(
    agent: ScriptedAgent, options: dict[str, Any]
) -> None:
    said: list[tm.RoundReady] = []
    half = 5

    def script(agent: ScriptedAgent) -> None:
        anchor = agent.begin(tau=1)
        flat = [
            (shard, at) for shard, count in enumerate(agent.manifest.sample_counts) for at in range(count)
        ]
        agent.expect(tm.LeaseRequest)
        agent.send(lease_of(flat, 0, 4, 6))
        agent.expect(tm.RoundReady)  # of the first batch; the others are under way
        agent.view(anchor, tm.Local.RESET, tau=1)
        assert agent.expect(tm.RoundReady).samples == 0
        agent.complete(tau=1)
        for start, end in ((half, half + 2), (half + 2, half + 4)):  # others have the rest
            agent.expect(tm.LeaseRequest)
            agent.send(lease_of(flat, start, end, 1))
            said.append(agent.expect(tm.RoundReady))
            agent.reduce(2, 2)
            agent.complete(tau=1)
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    one = Trainer(agent, 2, tau=1, **options)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    whole = numbers(agent)
    assert one.numbers == whole[:2] + whole[half : half + 4]
    assert [ready.samples for ready in said] == [2, 2]


@pytest.mark.parametrize("options", WORKERS)
def test_leases_that_are_taken_back_when_a_round_ends(agent: ScriptedAgent, options: dict[str, Any]) -> None:
    """The rest of the epoch was shared out anew: what was leased, and prepared, is others' or comes later."""

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=1)
        counts = agent.manifest.sample_counts
        flat = [(shard, at) for shard, count in enumerate(counts) for at in range(count)]
        agent.expect(tm.LeaseRequest)
        agent.send(lease_of(flat, 0, 6, 4))
        for start, end in ((6, 8), (3, 5), (8, 10)):
            agent.reduce(agent.expect(tm.RoundReady).samples, 2)
            agent.complete(tau=1, retake=True)
            agent.expect(tm.LeaseRequest)
            agent.send(lease_of(flat, start, end, 3))
        assert agent.expect(tm.RoundReady).samples == 2
        agent.send(tm.TrainerStop(reason=""))

    one = Trainer(agent, 2, tau=1, **options)
    with agent.play(script), pytest.raises(RunStopped):
        one.run()
    whole = numbers(agent)
    assert one.numbers[:6] == whole[:2] + whole[6:8] + whole[3:5]


@pytest.mark.parametrize("options", WORKERS)
def test_a_shard_that_is_missing_is_fetched_by_the_trainer(
    agent: ScriptedAgent, options: dict[str, Any]
) -> None:
    path = agent.store.path(agent.manifest.digest, 1)
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)

    class Fetching(Leader):
        fetched = 0

        def other(self, agent: ScriptedAgent, message: Any) -> None:
            assert isinstance(message, tm.ShardRequest) and message.shard == 1
            self.fetched += 1
            elsewhere.rename(path)
            agent.send(tm.ShardReady(dataset=message.dataset, shard=1, path=str(path)))

    leader = Fetching()
    one = Trainer(agent, 3, **options)
    with agent.play(leader):
        one.run()
    assert leader.fetched == 1
    assert one.numbers == numbers(agent)


@pytest.mark.parametrize("wrong", ["none", "another number"])
def test_a_shard_whose_index_was_made_wrong_is_fetched_once_and_named(
    agent: ScriptedAgent, wrong: str
) -> None:
    """Its digest is right, so every copy of it is like that."""
    path = agent.store.path(agent.manifest.digest, 1)
    counts = agent.manifest.sample_counts
    longer = next(shard for shard, count in enumerate(counts) if count != counts[1])
    other = agent.store.path(agent.manifest.digest, longer)
    path.write_bytes(bytes(path.stat().st_size) if wrong == "none" else other.read_bytes())

    class Fetching(Leader):
        fetched = 0

        def __call__(self, agent: ScriptedAgent) -> None:
            with contextlib.suppress(EOFError):
                super().__call__(agent)

        def other(self, agent: ScriptedAgent, message: Any) -> None:
            if isinstance(message, tm.TrainerBye):
                raise EOFError
            assert isinstance(message, tm.ShardRequest) and message.shard == 1
            self.fetched += 1
            agent.send(tm.ShardReady(dataset=message.dataset, shard=1, path=str(path)))

    leader = Fetching()
    with agent.play(leader), pytest.raises(UserError, match="has the right digest and cannot be read"):
        Trainer(agent, 3).run()
    assert leader.fetched == 1


class Broken(Exception):
    def __init__(self, what: str, code: int) -> None:
        super().__init__(what, code)
        self.code = code


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("where", ["decode", "collate_fn"])
def test_an_error_leaves_its_batch_undelivered(
    agent: ScriptedAgent, tmp_path: Path, options: dict[str, Any], where: str
) -> None:
    """It comes again when the script goes on; samples are neither lost nor counted without having been trained on."""
    mended = tmp_path / "mended"
    bad = numbers(agent)[5]

    def decode(sample: Any) -> float:
        if number(sample) == bad and where == "decode" and not mended.exists():
            raise Broken(sample["txt"], 7)
        return number(sample)

    def collate(items: list[float]) -> torch.Tensor:
        if bad in items and where == "collate_fn" and not mended.exists():
            raise Broken("collate", 7)
        return torch.tensor(items)

    def loop(one: Trainer, loader: Loader) -> None:
        with pytest.raises(Broken) as caught:
            one.all_batches(loader)
        assert caught.value.code == 7
        told = f"{caught.value.__cause__}{getattr(caught.value, '__notes__', '')}{caught.value}"
        if where == "decode":
            assert f"'s{bad:.0f}'" in told
            assert any(shard.digest.hex() in told for shard in agent.manifest.shards)
        if options:
            assert "Traceback" in told and where.removesuffix("_fn") in told
        assert one.numbers == numbers(agent)[:4]
        mended.touch()
        one.all_batches(loader)

    leader = Leader()
    one = Trainer(agent, 2, decode=decode, collate_fn=collate, **options)
    with agent.play(leader):
        one.run(loop)
    assert one.numbers == numbers(agent)
    assert sum(ready.samples for ready in leader.said) == 10


@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_that_is_left_goes_on_where_it_stopped(agent: ScriptedAgent, options: dict[str, Any]) -> None:
    def loop(one: Trainer, loader: Loader) -> None:
        one.step(next(iter(loader)))
        for batch in loader:
            one.step(batch)
            break
        for outer in loader:  # each batch goes to one of the loops
            one.step(outer)
            for inner in loader:
                one.step(inner)
                if len(one.batches) == 4:
                    break
        assert list(loader) == []  # all epochs are over
        assert list(loader.epochs()) == []

    leader = Leader()
    one = Trainer(agent, 2, **options)
    with agent.play(leader):
        one.run(loop)
    assert one.numbers == numbers(agent)
    assert sum(ready.samples for ready in leader.said) == 10


@pytest.mark.parametrize("options", WORKERS)
def test_epochs_one_by_one(agent: ScriptedAgent, options: dict[str, Any]) -> None:
    lengths: list[tuple[int, int]] = []

    def loop(one: Trainer, loader: Loader) -> None:
        for epoch in loader.epochs():
            before = len(one.batches)
            foreseen = len(epoch)
            for batch in epoch:
                one.step(batch)
            lengths.append((foreseen, len(one.batches) - before))

    one = Trainer(agent, 4, epochs=3, **options)
    with agent.play(Leader(epochs=3)):
        one.run(loop)
    assert lengths == [(3, 3)] * 3
    assert one.numbers == [x for epoch in range(3) for x in numbers(agent, epoch)]


def test_length_and_progress_bars(agent: ScriptedAgent) -> None:
    """An estimate, of one epoch: bars work whatever comes, also when more batches come than were foreseen."""
    seen: list[int] = []

    def loop(one: Trainer, loader: Loader) -> None:
        seen.append(len(loader))
        for batch in track(loader, disable=True):
            one.step(batch)
            seen.append(len(loader))
        seen.append(len(loader))

    one = Trainer(agent, 2, epochs=2)
    with agent.play(Leader(epochs=2)):
        one.run(loop)
    assert seen == [5] * 12


def test_length_while_others_share_the_work(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=9, world=3)
        agent.expect(tm.LeaseRequest)
        agent.send(tm.Lease(epoch=0, braids=(((0, 0, 2),),), left=1))
        agent.expect(tm.LeaseRequest)
        agent.send(tm.TrainerStop(reason=""))

    seen: list[int] = []

    def loop(one: Trainer, loader: Loader) -> None:
        for epoch in loader.epochs():
            seen.append(len(epoch))
            for batch in epoch:
                one.step(batch)
                seen.append(len(epoch))

    one = Trainer(agent, 2)
    with agent.play(script), pytest.raises(RunStopped):
        one.run(loop)
    assert seen == [2, 2]  # ten samples among three; then what this peer has and what is assigned to it


def test_it_is_a_dataloader(agent: ScriptedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()

    with agent.play(script), dmc.connect(agent.environment) as peer:
        data = peer.dataset("numbers")
        loader = peer.loader(data, 4, num_workers=2, prefetch_factor=3, pin_memory=True, timeout=9)
        assert isinstance(loader, DataLoader)
        assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (4, 2, 3)
        assert (loader.pin_memory, loader.timeout, loader.persistent_workers) == (True, 9, False)
        assert loader.dataset is data and not loader.drop_last
        for name in ("shuffle", "sampler", "batch_sampler", "generator", "drop_last"):
            with pytest.raises(UserError, match=rf"peer.loader\({name}=...\): .*leave it out"):
                peer.loader(data, 4, **{name: None})
        with pytest.raises(UserError, match='on_error \'maybe\': "stop" or "skip"'):
            peer.loader(data, 4, on_error="maybe")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="prefetch_factor 0: an integer from 1"):
            peer.loader(data, 4, num_workers=1, prefetch_factor=0)
        with pytest.raises(UserError, match="num_workers -1: an integer from 0"):
            peer.loader(data, 4, num_workers=-1)
        with pytest.raises(ValueError, match="persistent_workers"):
            peer.loader(data, 4, persistent_workers=True)
        with pytest.raises(TypeError, match="colate"):
            peer.loader(data, 4, colate=list)


def init(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    torch.set_default_dtype(torch.float64)  # a worker's own state, which decode below relies on
    os.environ["WORKER"] = f"{worker_id} of {info.num_workers}"


def decode_where(sample: Any) -> dict[str, Any]:
    return {"x": torch.tensor(number(sample)), "where": os.environ["WORKER"], "dice": torch.rand(())}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_are_prepared_by_the_script(
    agent: ScriptedAgent, context: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "PATIENCE_MS", 200_000)  # each new interpreter imports torch
    dice: list[float] = []

    def loop(one: Trainer, loader: Loader) -> None:
        state = torch.get_rng_state()
        for batch in loader:
            assert batch["x"].dtype is torch.float64 and not batch["x"].is_shared()  # as torch's own would be
            assert set(batch["where"]) <= {"0 of 2", "1 of 2"}
            dice.extend(batch["dice"].tolist())
            one.step(batch["x"])
        assert torch.equal(torch.get_rng_state(), state)  # the script's random numbers are its own

    one = Trainer(
        agent, 3, decode=decode_where, num_workers=2, worker_init_fn=init, multiprocessing_context=context
    )
    with agent.play(Leader()):
        one.run(loop)
    assert one.numbers == numbers(agent)
    assert len(set(dice)) == 10  # each worker throws its own


@pytest.mark.parametrize("options", WORKERS)
def test_samples_that_cannot_be_decoded_are_skipped(
    agent: ScriptedAgent, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Told in the round that counts the others; a batch of which nothing is left does not reach the loop."""
    whole = numbers(agent)
    bad = {whole[1], whole[4], whole[5], whole[7]}

    def decode(sample: Any) -> float:
        if number(sample) in bad:
            raise ValueError(f"no number: {sample['txt']!r}")
        return number(sample)

    leader = Leader()
    one = Trainer(agent, 2, decode=decode, on_error="skip", **options)
    with agent.play(leader):
        one.run()
    assert one.batches == [whole[:1], whole[2:4], whole[6:7], whole[8:10]]
    assert [(ready.samples, ready.skipped) for ready in leader.said] == [
        (4, ((1, 2),)),
        (4, ((0, 2), (3, 4))),
        (2, ()),
    ]
    assert [ready.steps for ready in leader.said] == [2, 2, 1]  # the empty batch is due like the others
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for line, x in zip(lines, [whole[1], whole[4], whole[5], whole[7]], strict=True):
        assert line.startswith(f"skipped: sample 's{x:.0f}' of shard ") and line.endswith(
            f"no number: b'{x:.0f}'"
        )


@pytest.mark.parametrize("options", WORKERS[::2])
def test_nothing_can_be_decoded(agent: ScriptedAgent, options: dict[str, Any]) -> None:
    def decode(sample: Any) -> float:
        raise ValueError

    leader = Leader()
    one = Trainer(agent, 3, decode=decode, on_error="skip", **options)
    with agent.play(leader):
        one.run()
    assert one.batches == []
    assert [(ready.samples, ready.skipped) for ready in leader.said] == [(6, ((0, 6),)), (4, ((0, 4),))]


def test_more_is_skipped_than_a_round_can_tell_of(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tm, "MAX_SKIPPED", 2)
    whole = numbers(agent)

    def decode(sample: Any) -> float:
        if number(sample) in whole[:6:2]:
            raise ValueError("odd")
        return number(sample)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=9)
        agent.expect(tm.LeaseRequest)
        agent.send(
            tm.Lease(epoch=0, braids=tuple(((s, 0, n),) for s, n in enumerate(agent.manifest.sample_counts)))
        )

    one = Trainer(agent, 6, decode=decode, on_error="skip")
    with (
        agent.play(script),
        pytest.raises(UserError, match=r"3 of the 6 samples .*ValueError: odd.*mend decode"),
    ):
        one.run()


def test_batches_between_two_steps_skip_no_more_than_a_round_can_tell_of(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tm, "MAX_SKIPPED", 2)
    whole = numbers(agent)

    def decode(sample: Any) -> float:
        if number(sample) in whole[:6:2]:
            raise ValueError("odd")
        return number(sample)

    def script(agent: ScriptedAgent) -> None:
        agent.begin(tau=9)
        agent.expect(tm.LeaseRequest)
        agent.send(
            tm.Lease(epoch=0, braids=tuple(((s, 0, n),) for s, n in enumerate(agent.manifest.sample_counts)))
        )

    def add_up(trainer: Trainer, loader: Loader) -> None:
        for batch in loader:
            trainer.batches.append(batch.tolist())

    one = Trainer(agent, 2, tau=9, decode=decode, on_error="skip")
    with agent.play(script), pytest.raises(UserError, match=r"1 of the 2 samples .*mend decode"):
        one.run(add_up)
    assert one.batches == [[whole[1]], [whole[3]]]


def test_a_round_comes_early_when_much_is_skipped(
    agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2p_dmc.train.tally.MAX_SKIPPED", 4)
    whole = numbers(agent)

    def decode(sample: Any) -> float:
        if number(sample) in whole[:6:2]:
            raise ValueError("odd")
        return number(sample)

    leader = Leader(tau=9)
    one = Trainer(agent, 2, tau=9, decode=decode, on_error="skip")
    with agent.play(leader):
        one.run()
    assert [ready.samples for ready in leader.said] == [4, 6]
    assert leader.said[0].skipped == ((0, 1), (2, 3))


def test_a_batch_is_named_also_when_its_shard_is_gone(agent: ScriptedAgent) -> None:
    def named(folder: Path) -> str:
        made = Source(
            mixture=Mixture.of(agent.manifest),
            store_root=folder,
            seed=0,
            decode=None,
            collate=list,
            skip=False,
        )
        return made.name(Batch(0, (((0, 0, 2),), ((1, 0, 2),))))

    first = [f"'s{x:.0f}'" for x in numbers(agent)[:2]]
    assert named(agent.store.path(agent.manifest.digest, 0).parents[2]).startswith(
        f"samples {', '.join(first)}, 's"
    )
    digest = agent.manifest.shards[0].digest.hex()
    assert named(agent.folder / "nowhere").startswith(f"samples '{digest}#") and " and 1 more" in named(
        agent.folder
    )
