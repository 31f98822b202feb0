"""The optimizer a script uses: local steps by an inner torch optimizer, and a round every tau of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from p2p_dmc.core.adacomm import TauPolicy
from p2p_dmc.errors import UserError
from p2p_dmc.train.inner_keeper import InnerKeeper
from p2p_dmc.train.names import name_parameters
from p2p_dmc.train.outer import Outer, policy_of
from p2p_dmc.train.state import FlatParameters

if TYPE_CHECKING:
    from p2p_dmc.train.session import Peer


@dataclass(frozen=True)
class AdaComm:
    """tau that comes down as the loss does: long rounds while any progress is cheap, short ones when they pay.

    Every ``t0_s`` seconds c = ceil(tau0 x sqrt(eta0 / eta x (F - Finf) / (F0 - Finf))) is looked at. F is the mean loss
    since the last look, F0 that of the first round, Finf = ``loss_floor`` what it cannot fall below, eta the
    learning rate and eta0 the greatest so far (their ratio is 1 with ``lr_ratio=False``). By ``policy``

    - "basic": tau = c;
    - "paper": tau = c where that is less than tau, else tau / 2, rounded up;
    - "plateau": as "paper", but halved only when F fell by less than a hundredth since the look before. The default:
      "paper" halves tau while the loss still falls well, and soon averages after every step, whatever that costs.

    ``tau0``: local steps of a round at first. "auto" measures three rounds of 8 steps and takes as many as make nine
    tenths of a round's time computation, never fewer than 8. tau exceeds neither ``tau_max`` nor a greater ``tau0``,
    and computation keeps ``min_utilisation`` of the time, however low the loss is; with 0 tau may come down to 1, as
    the paper has it.

    Source: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
    Local-Update SGD", MLSys 2019; "plateau", "auto" and ``min_utilisation`` are ours. Values that make no sense are a
    UserError when the optimizer is made.
    """

    policy: Literal["basic", "paper", "plateau"] = "plateau"
    tau0: int | Literal["auto"] = "auto"
    t0_s: float = 60.0
    tau_max: int = 64
    min_utilisation: float = 0.5
    loss_floor: float = 0.0
    lr_ratio: bool = True

    def to_policy(self) -> TauPolicy:
        """As the peers agree on it; UserError."""
        try:
            if self.tau0 == 0:
                raise ValueError("tau0 is 1 or more")
            tau0 = 0 if self.tau0 == "auto" else self.tau0
            return TauPolicy(
                kind="adacomm",
                tau0=tau0,
                t0_ms=round(self.t0_s * 1000),
                tau_max=max(self.tau_max, tau0),
                rule=self.policy,
                rate=self.lr_ratio,
                floor_micro=round(self.loss_floor * 1_000_000),
                utilisation_permille=round(self.min_utilisation * 1000),
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{self!r}: {error}") from None


class Optimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` to the outside; every tau steps the parameters are averaged with the other
    peers'.

    ``outer`` says what becomes of the average: "average" is the next parameters; "block" or
    ``dmc.Block(...)``, and "nesterov" or ``dmc.Nesterov(...)``, go on in the direction of the rounds before, with a
    momentum that all peers share.
    ``tau`` is a number of local steps, or an ``AdaComm``. ``model`` is only for the parameters' names in
    checkpoints (found by itself as a rule). The inner optimizer's state (momentum and the like) stays with
    its peer, is kept from round to round, and is restored at the first batch when this peer's trainer starts
    again in the same run (``inner_state`` says how); learning rate, momentum and betas are always the
    script's own. Parameters in its groups are shared; buffers (running
    statistics) and parameters that are in no group are not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        peer: Peer,
        tau: int | AdaComm = 8,
        model: torch.nn.Module | None = None,
        outer: Outer = "average",
    ) -> None:
        # not super().__init__(): groups, state and defaults are the inner optimizer's (see the properties
        # below)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(f"dmc.Optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        self._inner = optimizer
        self._rounds = peer._rounds
        self._model = model
        self._named: list[tuple[str, torch.Tensor]] = []
        self._keeper: InnerKeeper | None = None
        self._adaptive = isinstance(tau, AdaComm)
        self.policy = tau.to_policy() if isinstance(tau, AdaComm) else _fixed(tau)
        self.outer = policy_of(outer)
        peer._attach(self)

    def step(self, loss: Any = None) -> Any:
        """One local step, and a round if one is due.

        ``loss``: the batch's mean loss, a tensor of one element or a number; or torch's closure that computes
        it. AdaComm needs it; without AdaComm it is for the metrics. Returns the loss.
        """
        if not self._rounds.started:
            raise UserError("optimizer.step() before the first batch: take batches from peer.loader(...)")
        closure = loss if callable(loss) else None
        if closure is None:
            self._check_loss(loss)
            self._inner.step()
        else:
            loss = self._inner.step(closure)
            self._check_loss(loss)
        self._rounds.count_step(loss)
        self._rounds.after_step()
        if self._keeper is not None:
            self._keeper.after_step()
        return loss

    def _check_loss(self, loss: Any) -> None:
        if loss is None and self._adaptive:
            raise UserError(
                "AdaComm needs the loss: call optimizer.step(loss), or use a fixed tau such as tau=8"
            )
        if isinstance(loss, torch.Tensor) and loss.numel() != 1:
            raise UserError(
                f"optimizer.step(loss) takes one number, not a tensor of shape {tuple(loss.shape)}"
            )

    def flatten(self) -> FlatParameters:
        """The shared parameters, in the groups' order."""
        self._named = name_parameters(self._inner.param_groups, self._model)
        return FlatParameters(self._named)

    def keep_state(self, folder: Path, every_s: float) -> None:
        """Restore the inner optimizer's state that an earlier trainer left in ``folder``, and keep it there."""
        self._keeper = InnerKeeper(self._inner, self._named, self._rounds, folder, every_s)
        if not self._rounds.finished:
            self._keeper.restore()

    def end(self) -> None:
        """Write the inner optimizer's state down for the last time; takes a few seconds at most."""
        if self._keeper is not None:
            self._keeper.close()

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that makes the local steps."""
        return self._inner

    @property
    def tau(self) -> int:
        """Local steps of the current round."""
        return self._rounds.tau

    @property
    def may_decay(self) -> bool:
        """Whether tau has come down as far as it may, the same on all peers; always with a fixed tau.

        AdaComm's authors decay the learning rate only then: ``if optimizer.may_decay: scheduler.step()``.
        """
        return self._rounds.may_decay

    # -- a torch optimizer to the outside --------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._rounds.started:
            raise UserError(
                "add_param_group() after the first batch: all peers agreed on the parameters, add it before"
            )
        self._inner.add_param_group(param_group)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self._inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self._inner.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __repr__(self) -> str:
        return f"dmc.Optimizer({self._inner!r})"


def _fixed(tau: int) -> TauPolicy:
    try:
        return TauPolicy(kind="fixed", tau0=tau)
    except ValueError:
        raise UserError(
            f"tau {tau!r}: the number of local steps in a round, 1 or more, or dmc.AdaComm(...)"
        ) from None
