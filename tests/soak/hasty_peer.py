"""`dmc-peer` for the soak of a thousand views: no pause between changes of a view, and a member that flaps.

The run of a peer with the --name "flapping" steps out of the view, as one does whose trainer is lost, as soon as it
has completed a round in it, and asks to be let in again; its trainer lives on. That is two changes of the view or
three for the others, for the price of some messages. Everything else is the product's.
"""

from __future__ import annotations

import sys

from p2p_dmc.agent.run import Run
from p2p_dmc.config import AgentSettings
from p2p_dmc.core.agreement_messages import AgreementSettings

FLAPPING = "flapping"
PAUSE_MS = 1
"""In place of up to five seconds between attempts in a row, which protect a cluster from a member that flaps."""
TICK_MS = 20
"""Of the agent's clock, and between requests to be let in: a cycle is as short as its messages."""


def main() -> None:
    set_default(AgreementSettings, pause_ms=PAUSE_MS, pause_max_ms=PAUSE_MS)
    set_default(AgentSettings, tick_ms=TICK_MS, join_retry_ms=TICK_MS)
    if FLAPPING in sys.argv:
        flap()
    from p2p_dmc.cli import main as dmc_peer

    dmc_peer()


def set_default(settings: type, **values: int) -> None:
    """Of fields of a settings class."""
    (settings.__init__.__kwdefaults__ or {}).update(values)  # type: ignore[misc]


def flap() -> None:
    """At each tick of its agent, a run that has completed a round in its view leaves it and comes again."""
    tick = Run.tick

    def flapping(run: Run) -> None:
        tick(run)
        training = run.training
        if (
            training is not None
            and not training.frozen
            and training.held.ref.lineage > training.view.start.lineage
        ):
            run.withdraw("the soak test wants another view")
            run.trainer_ready()
            run.parked = False

    setattr(Run, "tick", flapping)  # noqa: B010 an assignment would be one to a method


if __name__ == "__main__":
    main()
