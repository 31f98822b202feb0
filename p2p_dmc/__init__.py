"""p2p_dmc: training on machines that nobody manages, with no machine in charge.

What a training script uses::

    import p2p_dmc as dmc

    with dmc.connect() as peer:  # under `dmc-peer join`
        data = peer.dataset("digits")
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), peer, tau=dmc.AdaComm())
        for x, y in peer.loader(data, batch_size=32, epochs=5, decode=decode):
            ...
            optimizer.step(loss)

Names are loaded when first used: the agent imports this package and must not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2p_dmc.errors import RunStopped, UserError
    from p2p_dmc.train.optimizer import AdaComm, Optimizer
    from p2p_dmc.train.outer import Block, Nesterov
    from p2p_dmc.train.session import Peer, connect, join

__version__ = "0.1.0"
__all__ = [
    "AdaComm",
    "Block",
    "Nesterov",
    "Optimizer",
    "Peer",
    "RunStopped",
    "UserError",
    "connect",
    "join",
]

_HOMES = {
    "AdaComm": "p2p_dmc.train.optimizer",
    "Block": "p2p_dmc.train.outer",
    "Nesterov": "p2p_dmc.train.outer",
    "Optimizer": "p2p_dmc.train.optimizer",
    "Peer": "p2p_dmc.train.session",
    "RunStopped": "p2p_dmc.errors",
    "UserError": "p2p_dmc.errors",
    "connect": "p2p_dmc.train.session",
    "join": "p2p_dmc.train.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'p2p_dmc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
