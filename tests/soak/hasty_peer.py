"""`dmc-peer` for the soak of a thousand views: no pause between changes of a view, and a member that flaps.

The run of a peer with the --name "flapping" steps out of the view, as one does whose trainer is lost, as soon as it
has completed a round in it, and asks to be let in again; its trainer lives on. That is two changes of the view or
three for the others, for the price of some messages. Everything else is the product's.
"""

from __future__ import annotations

import sys

from p2p_dmc.agent.run import Run
from p2p_dmc.core.agreement_messages import AgreementSettings

FLAPPING = "flapping"
PAUSE_MS = 1
"""In place of up to five seconds between attempts in a row, which protect a cluster from a member that flaps."""


def main() -> None:
    (AgreementSettings.__init__.__kwdefaults__ or {}).update(pause_ms=PAUSE_MS, pause_max_ms=PAUSE_MS)
    if FLAPPING in sys.argv:
        flap()
    from p2p_dmc.cli import main as dmc_peer

    dmc_peer()


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
