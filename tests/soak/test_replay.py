"""The replay against the product's own arithmetic, and that it sees one wrong sample, weight or order."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import xxhash

from p2p_dmc.train import state
from tests.soak.replay import Sample, model, parts_of, replay

SHARDS, POSITIONS = 3, 8


def read(at: Sample) -> tuple[torch.Tensor, int]:
    """A sample of random text, the same each time."""
    rng = random.Random(repr(at))
    return model.features(rng.randbytes(200)), rng.randrange(model.CLASSES)


def trained(rounds: int, members: int, seed: int) -> list[dict[str, Any]]:
    """Lines of a run that was trained with autograd, torch's SGD and the product's averaging, in random order."""
    rng = random.Random(seed)
    anchor, lines = model.initial().reshape(-1), []
    for number in range(1, rounds + 1):
        weights = [rng.randrange(4) for _ in range(members)]
        counted = [[[rng.randrange(SHARDS), at, at + 1]] for at in range(sum(weights))]
        line: dict[str, Any] = {"view_epoch": 1, "round": number, "epoch": 0}
        line |= {"weights": weights, "counted": counted}
        deltas = []
        for part in parts_of(line):
            local = local_steps(anchor, [read((0, *at)) for at in part])
            state.weighted_delta(anchor, local, len(part))
            deltas.append(local)
        reduced = torch.zeros_like(anchor)
        for delta in rng.sample(deltas, members):
            reduced += delta
        after = torch.empty_like(anchor)
        state.average(anchor, reduced, sum(weights), out=after)
        anchor = after
        lines.append(line | {"digest": xxhash.xxh3_128(anchor.numpy().data).hexdigest()})
    return lines


def local_steps(anchor: torch.Tensor, samples: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    weights = torch.nn.Parameter(anchor.clone().view(model.CLASSES, model.FEATURES))
    inner = torch.optim.SGD([weights], lr=model.LEARNING_RATE)
    for x, wanted in samples:
        inner.zero_grad()
        model.mistake(weights, x, wanted).backward()
        inner.step()
        with torch.no_grad():
            weights.clamp_(model.LOW, model.HIGH)
    return weights.detach().clone().reshape(-1)


@pytest.mark.parametrize("members", [1, 2, 5])
def test_it_comes_to_the_same_bits_as_training_did(members: int) -> None:
    lines = trained(20, members, seed=members)
    result = replay(lines, read)
    assert not result.faults and result.rounds == 20
    assert result.samples == sum(sum(line["weights"]) for line in lines)
    assert not torch.equal(result.parameters, model.initial()), "nothing was learned: nothing was shown"


@pytest.mark.parametrize("what", ["sample", "weight", "order", "epoch"])
def test_it_sees_what_is_wrong(what: str) -> None:
    lines = trained(6, 3, seed=7)
    line = next(line for line in lines[2:] if all(line["weights"]) and max(line["weights"]) > 1)
    if what == "sample":
        line["counted"][0] = [[SHARDS, 0, 1]]
    elif what == "weight":
        line["weights"][0] += 1
        line["weights"][1] -= 1
    elif what == "order":
        line["counted"] = line["counted"][::-1]
    else:
        line["epoch"] = 1
    [fault] = replay(lines, read).faults
    assert f"round {line['round']}:" in fault


def test_a_round_without_weight_leaves_the_anchor() -> None:
    digest = xxhash.xxh3_128(model.initial().numpy().data).hexdigest()
    line = {"view_epoch": 1, "round": 1, "epoch": 0, "weights": [0, 0], "counted": [], "digest": digest}
    assert not replay([line], read).faults


def test_a_coded_round_is_named_and_not_taken_for_another_anchor() -> None:
    lines = trained(3, 2, 5)
    lines[1]["compress"] = "int8"
    (fault,) = replay(lines, read).faults
    assert fault.startswith("view 1 round 2: it travelled as int8")
