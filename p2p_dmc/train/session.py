"""A script's session with the agent that started it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.proportions import TOLERANCE
from p2p_dmc.errors import RunStopped, UserError
from p2p_dmc.train.collective import GroupKeeper
from p2p_dmc.train.dataset import Dataset
from p2p_dmc.train.link import AgentLink, LinkFailed
from p2p_dmc.train.loader import Loader, OnError
from p2p_dmc.train.mixing import mixture_meant
from p2p_dmc.train.rounds import Rounds
from p2p_dmc.train.source import Collate, Decode
from p2p_dmc.wire import trainer_messages as tm

if TYPE_CHECKING:
    from p2p_dmc.train.optimizer import Optimizer

_SHUFFLED = "the order is the run's, shuffled by seed= and the same whoever takes part; leave it out"
NOT_THE_SCRIPTS = {
    "shuffle": _SHUFFLED,
    "sampler": _SHUFFLED,
    "batch_sampler": _SHUFFLED,
    "generator": _SHUFFLED,
    "drop_last": "no sample is dropped, and a short batch weighs what it has; leave it out",
}
"""Options of torch's DataLoader that a run settles, and why."""
WELCOME_TIMEOUT_S = 30.0  # the agent is on this machine and does nothing slow


def connect(environment: Mapping[str, str] = os.environ) -> Peer:
    """This script's peer; for scripts started by ``dmc-peer join``, UserError elsewhere."""
    endpoint, run = environment.get(tm.ENV_AGENT), environment.get(tm.ENV_RUN)
    if not endpoint or run is None:
        raise UserError(f"{tm.ENV_AGENT} is not set: start this script with `dmc-peer join SEED SCRIPT`")
    lifeline = environment.get(tm.ENV_LIFELINE)
    return Peer(endpoint, run, int(lifeline) if lifeline else None)


def join(
    seed: str,
    *,
    run: str,
    home: str | Path | None = None,
    name: str | None = None,
    insecure: bool = False,
    domain: str | None = None,
    options: Sequence[str] = (),
) -> Peer:
    """Join the peers at ``seed`` from a process that runs already, a notebook say.

    Starts an agent for ``home`` (default ``~/.p2p_dmc``), which lives until the session is closed or this process
    ends. ``run`` names the run, ``domain`` what this peer may fail together with (default: what the home was last
    told), ``options`` are more options of ``dmc-peer join``. UserError when the agent cannot start; what it says stands
    in ``agent.log`` and on this process's standard error.
    """
    folder = Path(home if home is not None else Path.home() / ".p2p_dmc").expanduser().absolute()
    command = [sys.executable, "-m", "p2p_dmc.cli", "join", "--home", str(folder), "--run", run]
    command += ["--attach", str(os.getpid())]
    command += (["--name", name] if name else []) + (["--insecure"] if insecure else [])
    command += ["--domain", domain] if domain is not None else []
    agent = subprocess.Popen([*command, *options, seed], stdin=subprocess.DEVNULL, start_new_session=True)
    endpoint = _endpoint_of(agent, folder)
    return Peer(endpoint, run, None, agent)


def _endpoint_of(agent: subprocess.Popen[bytes], folder: Path) -> str:
    """Where the agent that was just started listens for its trainer; UserError when it ended or took too long."""
    deadline = time.monotonic() + WELCOME_TIMEOUT_S
    while time.monotonic() < deadline and agent.poll() is None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            facts = json.loads((folder / "agent.json").read_text())
            if facts["pid"] == agent.pid:
                return str(facts["endpoint"])
        time.sleep(0.02)
    agent.kill()
    agent.wait()
    raise UserError(
        f"the agent for {folder} did not start; its last line stands above and in agent.log there"
    )


class Peer:
    """This machine in the run. A context manager: the session ends with it."""

    def __init__(
        self, endpoint: str, run: str, lifeline: int | None, agent: subprocess.Popen[bytes] | None = None
    ) -> None:
        """``agent``: one that this process started itself; its end ends the session, not the process."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._groups = GroupKeeper(self._send)
        self._link = AgentLink(endpoint, lifeline, self._early)
        if agent is not None:
            watch = threading.Thread(target=self._watch, args=(agent,), name="dmc-agent-watch", daemon=True)
            watch.start()
        self._rounds = Rounds(self._link, self._groups)
        self._run = run
        self._optimizer: Optimizer | None = None
        self._loader: Loader | None = None
        hello = tm.TrainerHello(
            run=run,
            pid=os.getpid(),
            script_digest=_script_digest(),
            torch_version=torch.__version__,
            device=str(self.device),
            nccl=self.device.type == "cuda" and dist.is_nccl_available(),
        )
        self._welcome = self._introduce(hello)
        self._groups.host = self._welcome.collective_host

    @property
    def peer_id(self) -> str:
        """This peer's permanent identity."""
        return self._welcome.peer_id

    @property
    def name(self) -> str:
        """For people."""
        return self._welcome.name

    @property
    def is_first(self) -> bool:
        """First in the view's ring order; one peer is. False until there is a view (the first batch)."""
        view = self._rounds.view
        return view is not None and view.rank == 0

    def dataset(
        self,
        name: str | Mapping[str, float] | None = None,
        *,
        repeat: Mapping[str, int] | None = None,
        tolerance: float = TOLERANCE,
    ) -> Dataset:
        """The data set of that name; waits until its manifest and a first shard are on this machine.

        Several at once: ``name`` maps the names to weights, ``{"web": 0.7, "code": 0.3}``, and an epoch is as many
        whole passes over each that its share of the samples is its weight's, give or take ``tolerance`` (0.01: a
        percentage point). Or ``repeat`` maps the names to the passes. Each sample counts once in each pass.
        """
        mixture = mixture_meant(name, repeat, tolerance, self._manifest)
        return Dataset(mixture, Path(self._welcome.store_root), self._rounds)

    def _manifest(self, name: str) -> Manifest:
        self._send(tm.DatasetRequest(name=name))
        ready = self._rounds.expect(tm.DatasetReady, lambda message: message.name == name)
        return Manifest.from_bytes(Path(ready.manifest_path).read_bytes())

    def loader(
        self,
        data: Dataset,
        batch_size: int,
        epochs: int = 1,
        decode: Decode | None = None,
        seed: int = 0,
        collate_fn: Collate | None = None,
        *,
        on_error: OnError = "stop",
        num_workers: int = 0,
        **torch_options: Any,
    ) -> Loader:
        """Batches of ``batch_size`` samples on ``device``, for ``epochs`` passes over the data by all peers
        together.

        ``decode`` turns a sample (see ``Dataset``) into tensors, ``collate_fn`` a list of those into a batch
        (torch's default). ``seed`` orders the data, the same on all peers. Parameters are the run's when the
        first batch is there. A sample that ``decode`` raises on ends the script, or with ``on_error="skip"`` it is
        left out and counted as skipped. ``num_workers`` processes and ``torch_options`` (``prefetch_factor``,
        ``pin_memory``, ``persistent_workers``, ``timeout``, ``worker_init_fn``, ``multiprocessing_context``) are as
        torch's DataLoader has them.
        """
        for name in torch_options:
            if name in NOT_THE_SCRIPTS:
                raise UserError(f"peer.loader({name}=...): {NOT_THE_SCRIPTS[name]}")
        return Loader(
            self,
            data,
            batch_size,
            epochs,
            decode,
            seed,
            collate_fn,
            on_error=on_error,
            num_workers=num_workers,
            **torch_options,
        )

    def close(self) -> None:
        """End the session with the agent; the optimizer's state is on disk then."""
        if self._optimizer is not None:
            self._optimizer.end()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._loader is not None:
            self._loader.close()
        self._send(tm.TrainerBye())
        self._groups.close()
        self._link.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, RunStopped) or self._rounds.finished:
            self.close()
        else:  # the script failed, perhaps in the middle of a step
            self._hang_up()

    @property
    def _run_folder(self) -> Path:
        return Path(self._welcome.home) / "runs" / self._run

    def _attach(self, optimizer: Optimizer) -> None:
        if self._optimizer is not None:
            raise UserError(
                "a second dmc.Optimizer: a run has one, give it all parameters (several groups are fine)"
            )
        self._optimizer = optimizer

    def _watch(self, agent: subprocess.Popen[bytes]) -> None:
        """Wait for the end of an agent that this process started; a main thread that needs it is told."""
        agent.wait()
        self._link.fail(f"the agent ended (exit code {agent.returncode}); see agent.log in its home")

    def _send(self, message: Any) -> None:
        self._link.send(message)

    def _early(self, message: Any) -> bool:
        """On the link's thread, also while the main thread computes: groups are made and cancelled."""
        match message:
            case tm.StoreValue():
                self._groups.put(message)
            case tm.CancelGroup():
                self._groups.cancel(message.view_epoch)
            case tm.ViewStarted():
                self._groups.start(message)
                return False
            case tm.TrainerWelcome():
                self._groups.host = message.collective_host
                return False
            case tm.TrainerStop() | tm.TrainerRefused():
                self._groups.close()  # the main thread may wait in a collective
                return False
            case _:
                return False
        return True

    def _introduce(self, hello: tm.TrainerHello) -> tm.TrainerWelcome:
        self._send(hello)
        try:
            answer = self._link.get(WELCOME_TIMEOUT_S)
        except LinkFailed as failed:
            raise UserError(f"{failed}") from None
        except queue.Empty:
            raise UserError(
                f"the agent did not answer within {WELCOME_TIMEOUT_S:.0f} s: see its agent.log"
            ) from None
        match answer:
            case tm.TrainerWelcome():
                return answer
            case tm.TrainerRefused():
                raise UserError(answer.reason)
            case tm.TrainerStop():
                raise RunStopped()
        raise RuntimeError(f"the agent answered {type(answer).__name__}")


def _script_digest() -> bytes:
    """BLAKE2b-128 of the script's text; empty when there is none (a notebook)."""
    try:
        text = Path(sys.argv[0]).read_bytes()
    except OSError:
        return b""
    return hashlib.blake2b(text, digest_size=16).digest()
