"""A loader's state by torchdata's StatefulDataLoader conventions, in a run whose ledger is the truth.

Where the run stands is in its checkpoints and on the other peers; nothing that a script has saved can move it. So the
state only says of which point it is, and loading it checks that this run has come that far.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from p2p_dmc.errors import UserError
from p2p_dmc.train.rounds import Rounds

VERSION = 1
TYPES = {"version": int, "dataset": str, "seed": int, "history": str, "epoch": int, "round": int}


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Plain values, so that any format keeps them."""

    version: int
    dataset: str  # digest, hexadecimal
    seed: int
    history: str  # hexadecimal; "" before the first batch
    epoch: int  # that the ledger was in, from 0
    round: int  # the last complete one; rounds count through a whole history

    @classmethod
    def now(cls, dataset: str, seed: int, rounds: Rounds) -> LoaderState:
        """After the last complete round."""
        histories = rounds.histories
        return cls(
            version=VERSION,
            dataset=dataset,
            seed=seed,
            history=histories[0].hex() if histories else "",
            epoch=rounds.epoch,
            round=rounds.last_round,
        )

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> LoaderState:
        """UserError for what `to_dict` would not have made."""
        fits = isinstance(state, Mapping) and state.keys() == TYPES.keys()
        if not fits or any(type(state[name]) is not kind for name, kind in TYPES.items()):
            raise UserError(
                f"a loader's state has {', '.join(TYPES)}; give what loader.state_dict() returned"
            )
        if state["version"] != VERSION:
            raise UserError(f"a loader's state of version {state['version']}; this p2p_dmc reads {VERSION}")
        return cls(**state)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def check_data(self, dataset: str, seed: int) -> None:
        """UserError when it is of other data, or of another order."""
        if self.dataset != dataset:
            raise UserError(f"the loader's state is of data set {self.dataset[:12]}, not of {dataset[:12]}")
        if self.seed != seed:
            raise UserError(f"the loader's state is of seed={self.seed}, the loader has seed={seed}")

    def check_run(self, rounds: Rounds) -> None:
        """UserError when it is of another run; a line when this one has lost rounds that it knows of."""
        histories = [history.hex() for history in rounds.histories]
        if self.history and self.history not in histories:
            raise UserError(
                f"the loader's state is of history {self.history[:8]}, and this run's is {histories[0][:8]}: "
                "join the run that it was saved in, or load no state"
            )
        if self.history and self.round > rounds.last_round:
            print(
                f"the loader's state is of round {self.round}, the run goes on from round {rounds.last_round}: "
                "later ones were lost, and their samples come again",
                file=sys.stderr,
            )
