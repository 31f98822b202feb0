"""A loop that forgets the optimizer's step would train nothing, and nothing would be wrong with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.errors import UserError
from p2p_dmc.train.loader import Loader
from p2p_dmc.wire.trainer_messages import LeaseEnd


def loader_whose(samples: int, ever_stepped: bool) -> tuple[Loader, list[str]]:
    rounds: list[str] = []
    loader = Loader.__new__(Loader)
    loader._rounds = cast(
        Any,
        SimpleNamespace(
            samples=samples,
            ever_stepped=ever_stepped,
            consume_yielded=lambda: None,
            synchronise=lambda: rounds.append("round"),
        ),
    )
    return loader, rounds


END = LeaseEnd(epoch=0, finished=False)


def test_samples_without_any_step_are_the_scripts_mistake() -> None:
    loader, rounds = loader_whose(96, ever_stepped=False)
    with pytest.raises(UserError, match=r"96 samples .* call step\(loss\)"):
        loader._wait_out(END)
    assert not rounds


@pytest.mark.parametrize(("samples", "ever_stepped"), [(0, False), (96, True)])
def test_a_peer_without_samples_or_with_steps_takes_part(samples: int, ever_stepped: bool) -> None:
    loader, rounds = loader_whose(samples, ever_stepped)
    loader._wait_out(END)
    assert rounds == ["round"]
