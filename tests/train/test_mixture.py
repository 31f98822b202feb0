"""A script that trains on several data sets: what it may write, what it is told, and which samples it gets."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import p2p_dmc as dmc
from p2p_dmc.core.ledger import sample_permutation
from p2p_dmc.data import mixture
from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture, Part
from p2p_dmc.data.samples import SampleReader
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.writing import write_shards
from p2p_dmc.errors import UserError
from p2p_dmc.train.loader import Loader
from p2p_dmc.train.mixing import mixture_meant
from p2p_dmc.wire import trainer_messages as tm
from tests.data.test_mixture import CODE, WEB
from tests.train.loading import Leader, Trainer, leave_out_earlier, number
from tests.train.scripted import ScriptedAgent

MORE = 6
"""Samples of "more", beside the ten of "numbers"."""


class MixedAgent(ScriptedAgent):
    """Has "numbers" once and "more" twice an epoch; in "more" the numbers go on from 100, in folders a and b."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        source = folder / "more"
        for index in range(MORE):
            (source / "ab"[index % 2]).mkdir(parents=True, exist_ok=True)
            (source / "ab"[index % 2] / f"s{index}.txt").write_text(str(100 + index))
        found = scan(source)
        shards = plan_shards(found, max_shard_size=5000)
        more = write_shards(shards, self.store, scan=found, name="more", mode="file", replicas=1, seed=0)
        self.sets = {"numbers": self.manifest, "more": more}
        self.mixture = Mixture((Part(self.manifest, 1), Part(more, 2)))
        self.ready: tm.RunReady | None = None

    def dataset(self) -> None:
        for _ in self.sets:
            request = self.expect(tm.DatasetRequest)
            digest = self.sets[request.name].digest
            path = self.folder / "store" / digest.hex() / "manifest.msgpack"
            self.send(tm.DatasetReady(name=request.name, digest=digest, manifest_path=str(path)))

    def initial(self) -> Any:
        self.manifest = cast(Manifest, self.mixture)  # whose shards are leased
        return super().initial()

    def expect(self, kind: type[Any]) -> Any:
        message = super().expect(kind)
        self.ready = message if kind is tm.RunReady else self.ready
        return message

    def numbers(self, epoch: int = 0) -> list[float]:
        """In the order in which ``Leader`` hands them out, worked out from the mixture's definition."""
        found = []
        with SampleReader() as reader:
            for shard, count in enumerate(self.mixture.sample_counts):
                manifest, at, first = self.mixture.where(shard)
                path = self.store.path(manifest.digest, at)
                order = sample_permutation(self.mixture.digest, 0, epoch, shard, count)
                read = reader.read_many(path, manifest, at, [first + index for index in order])
                found += [float(sample["txt"]) for sample in read]
        return found


class MixedTrainer(Trainer):
    mix: Any = {"numbers": 5, "more": 6}

    def run(self, loop: Any = None) -> None:
        with dmc.connect(self.agent.environment) as peer:
            self.data = peer.dataset(self.mix)
            self.optimizer = dmc.Optimizer(
                torch.optim.SGD(self.model.parameters(), lr=0.0), peer, tau=self.tau
            )
            self.loader = peer.loader(self.data, self.batch_size, **self.options)
            (loop or Trainer.all_batches)(self, self.loader)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MixedAgent:
    monkeypatch.setattr(mixture, "LEAST_SAMPLES", 2)
    one = MixedAgent(tmp_path)
    assert any(one.mixture.where(shard).first for shard in range(len(one.mixture))), "no shard is cut"
    return one


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_is_every_sample_of_every_pass(
    agent: MixedAgent, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_out_earlier()
    lengths: list[int] = []
    states: list[dict[str, Any]] = []

    def loop(one: Trainer, loader: Loader) -> None:
        for batch in loader:
            lengths.append(len(loader))
            one.step(batch)
        states.append(loader.state_dict())

    one = MixedTrainer(agent, 2, epochs=2, num_workers=workers)
    with agent.play(Leader(epochs=2)):
        one.run(loop)
    first, second = agent.numbers(0), agent.numbers(1)
    assert one.numbers == first + second and first != second
    assert Counter(first) == Counter([*range(10), *range(100, 106), *range(100, 106)])
    passes = [n for n in first if n >= 100]
    assert sorted(passes[:MORE]) == sorted(passes[MORE:]) == list(range(100, 100 + MORE))
    assert lengths[0] == len(one.batches) / 2 == 11
    assert states[0]["dataset"] == agent.mixture.digest.hex()
    assert agent.ready is not None and agent.ready.dataset == agent.mixture.digest
    assert agent.ready.parts == tuple(
        (agent.sets[name].digest, n) for name, n in (("more", 2), ("numbers", 1))
    )
    assert capsys.readouterr().err.splitlines() == [
        "an epoch is 2 x more + 1 x numbers: 22 samples, more 54.5%, numbers 45.5%"
    ]


def test_what_the_script_sees_of_it(agent: MixedAgent) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.welcome()
        agent.dataset()

    with agent.play(script), dmc.connect(agent.environment) as peer:
        data = peer.dataset(repeat={"numbers": 1, "more": 2})
        samples, keys = list(data), list(data.keys())
        alone = {name: list(part) for name, part in data.parts.items()}
    assert (len(data), data.name, data.passes) == (22, "2 x more + 1 x numbers", {"more": 2, "numbers": 1})
    assert data.digest == agent.mixture.digest and data.classes == ("a", "b")
    assert [sample["__key__"] for sample in samples] == keys and len(samples) == 22
    of = Counter((sample["__dataset__"], number(sample)) for sample in samples)
    assert of == Counter({("numbers", i): 1 for i in range(10)} | {("more", 100 + i): 2 for i in range(MORE)})
    assert {name: sorted(map(number, part)) for name, part in alone.items()} == {
        "numbers": list(range(10)),
        "more": list(range(100, 100 + MORE)),
    }


def test_a_shard_that_is_elsewhere_is_asked_for_as_its_data_sets(agent: MixedAgent) -> None:
    more = agent.sets["more"]
    path = agent.store.path(more.digest, 1)
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    asked: list[tuple[bytes, int]] = []

    class Fetching(Leader):
        def other(self, agent: ScriptedAgent, message: Any) -> None:
            assert isinstance(message, tm.ShardRequest)
            asked.append((message.dataset, message.shard))
            if elsewhere.exists():
                elsewhere.rename(path)
            agent.send(tm.ShardReady(dataset=message.dataset, shard=message.shard, path=str(path)))

    one = MixedTrainer(agent, 2)
    with agent.play(Fetching()):
        one.run()
    assert set(asked) == {(more.digest, 1)} and one.numbers == agent.numbers()


def test_a_decoder_that_raises_names_the_data_set(
    agent: MixedAgent, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(sample: Any) -> float:
        if number(sample) == 103:
            raise ValueError("odd")
        return number(sample)

    one = MixedTrainer(agent, 2, decode=decode, on_error="skip")
    with agent.play(Leader()):
        one.run()
    assert 103 not in one.numbers and len(one.numbers) == 20
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipped")]
    assert len(said) == 2  # once in each pass
    assert all(
        "sample 'b/s3' of shard" in line and " of data set 'more': ValueError: odd" in line for line in said
    )


# -- what may be written ----------------------------------------------------------------------------------------------

WEB_VAL = dataclasses.replace(CODE, name="web-val")
SETS = {"web": WEB, "code": CODE, "web@abcd": WEB, "web-val": WEB_VAL, "held": WEB_VAL}


def meant(name: Any = None, repeat: Any = None, tolerance: Any = 0.01) -> Mixture:
    return mixture_meant(name, repeat, tolerance, SETS.__getitem__)


def test_one_data_set_is_no_mixture_however_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert meant("web") == meant({"web": 0.5}) == meant(repeat={"web": 1}) == Mixture.of(WEB)
    assert capsys.readouterr().err == ""


def test_weights_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """12 samples of web, 8 of code."""
    assert (
        meant({"web": 1, "code": 2})
        == meant(repeat={"code": 3, "web": 1})
        == Mixture((Part(WEB, 1), Part(CODE, 3)))
    )
    assert meant({"web": 1, "code": 1}, tolerance=0.2) == Mixture((Part(WEB, 1), Part(CODE, 1)))
    assert meant({"web": 1, "code": 1}) == Mixture((Part(WEB, 2), Part(CODE, 3)))
    assert capsys.readouterr().err.splitlines()[0] == (
        "an epoch is 3 x code + 1 x web: 36 samples, code 66.7%, web 33.3%"
    )


def test_a_weight_that_is_none_is_said_before_anything_is_waited_for() -> None:
    def never(name: str) -> Manifest:
        raise AssertionError(name)

    with pytest.raises(UserError, match="weight -1 of data set 'web'"):
        mixture_meant({"code": 1, "web": -1}, None, 0.01, never)


def test_what_was_held_out_of_something_else_can_be_mixed() -> None:
    assert meant(repeat={"web-val": 1, "code": 1}) == Mixture((Part(WEB_VAL, 1), Part(CODE, 1)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, 'data sets None and repeat None: write peer.dataset("web"), '),
        ({"name": "web", "repeat": {"web": 2}}, "data sets 'web' and repeat {'web': 2}: write peer.dataset"),
        ({"name": {}}, "data sets {}: write peer.dataset"),
        ({"name": ["web", "code"]}, "data sets ['web', 'code']: write peer.dataset"),
        ({"name": {WEB: 1}}, "write peer.dataset"),
        ({"name": {"web": 0, "code": 1}}, "weight 0 of data set 'web'"),
        ({"name": {"web": 1, "code": 1}, "tolerance": 2}, "tolerance 2"),
        ({"repeat": {"web": 0.5}}, "0.5 passes over data set 'web' an epoch; give 1 to 1000"),
        (
            {"repeat": {"web": 1, "web@abcd": 1}},
            "data set 'web' is in the mixture twice; name one version of it",
        ),
        (
            {"name": {"web": 0.9, "code": 1, "web-val": 0.1}},
            "data set 'web-val' is what was held out of 'web', and",
        ),
        (
            {"repeat": {"held": 1, "web@abcd": 1}},
            "leave one of them out, or seed all of it under another --name",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_in_a_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        meant(**given)
    assert said in str(refused.value) and "\n" not in str(refused.value)
