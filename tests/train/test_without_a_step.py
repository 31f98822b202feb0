"""A loop that forgets the optimizer's step would train nothing, and nothing would be wrong with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dmc.errors import UserError
from p2p_dmc.train.loader import Loader
from p2p_dmc.train.tally import Tally
from p2p_dmc.wire.trainer_messages import LeaseEnd


def loader_whose(
    samples: int, ever_stepped: bool, skipped: int = 0, overflowed: bool = False
) -> tuple[Loader, list[str]]:
    rounds: list[str] = []
    loader = Loader.__new__(Loader)
    tally = Tally()
    tally.hand_out(samples, range(skipped))
    loader._rounds = cast(
        Any,
        SimpleNamespace(
            tally=tally,
            ever_stepped=ever_stepped,
            overflowed=overflowed,
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


@pytest.mark.parametrize(
    ("samples", "ever_stepped", "skipped", "overflowed"),
    [(0, False, 0, False), (96, True, 0, False), (96, False, 96, False), (96, False, 0, True)],
)
def test_a_peer_without_samples_or_with_steps_takes_part(
    samples: int, ever_stepped: bool, skipped: int, overflowed: bool
) -> None:
    """Overflowed: a GradScaler has left all its steps out so far."""
    loader, rounds = loader_whose(samples, ever_stepped, skipped, overflowed)
    loader._wait_out(END)
    assert rounds == ["round"]
