"""`dmc-peer` whose agent serves wrong bytes of every state. Run as ``lying_peer.py dmc-peer ARGUMENTS``.

It lies while the file is there that the environment variable `DMC_LIES` names, and adds a line to it each time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from p2p_dmc.agent.adoption import ANCHOR
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.wire.messages import BulkRequest

ENV_LIES = "DMC_LIES"


def main() -> None:
    provide = StateKeeper.provide

    def lie(keeper: StateKeeper, request: BulkRequest) -> tuple[int, bytes | memoryview] | None:
        found = provide(keeper, request)
        lies = Path(os.environ[ENV_LIES])
        if found is None or request.part != ANCHOR or not lies.exists():
            return found
        with lies.open("a") as file:
            file.write(f"{request.offset}\n")
        return found[0], bytes(one ^ 1 for one in found[1])

    setattr(StateKeeper, "provide", lie)  # noqa: B010 an assignment would be one to a method
    del sys.argv[1]
    from p2p_dmc.cli import main as dmc_peer

    dmc_peer()


if __name__ == "__main__":
    main()
