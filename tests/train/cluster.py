"""A whole view in one process: every trainer is a real session on a thread of its own, with real gloo between them; the
agents' part is played by one thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zmq

import p2p_dmc as dmc
from p2p_dmc.data.formats import scan
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards
from p2p_dmc.train.session import Peer
from p2p_dmc.wire import codec
from p2p_dmc.wire import trainer_messages as tm

RUN = "test"
PATIENCE_MS = 30_000
DEADLINE_S = 180
"""Of a whole run, a second or two on an idle machine."""
SLOTS = 3
"""Of each trainer: the anchor, the candidate, and the anchor before, which may still be read."""

Place = tuple[int, int]
"""A shard, and a position in the epoch's order of it."""


class Cluster:
    """Trainers in one view, from the founding to the run's end; the files in ``source`` are the data set "data".

    An epoch's samples are dealt out to them in ``shares``. ``lines`` are the rounds as ``metrics.jsonl`` has them,
    ``anchors`` the parameters after each, the initial ones first, ``said`` what the trainers said before it.

    Scripts tell the optimizer the parameters' names: looking for them among all living objects, as is done otherwise,
    takes hold of what other threads are just making, which CPython does not bear (``gc.get_objects``).
    """

    def __init__(
        self, folder: Path, source: Path, *, epochs: int = 1, tau: int = 1, shares: Sequence[int] = (1,)
    ) -> None:
        self.folder, self.epochs, self.tau, self.world = folder, epochs, tau, len(shares)
        self.store = Store(folder / "store")
        found = scan(source)
        self.manifest = write_shards(
            plan_shards(found, max_shard_size=20_000),
            self.store,
            scan=found,
            name="data",
            mode="file",
            replicas=1,
            seed=0,
        )
        flat = [(shard, at) for shard, n in enumerate(self.manifest.sample_counts) for at in range(n)]
        ends = [sum(shares[: i + 1]) * len(flat) // sum(shares) for i in range(self.world)]
        self.assigned = [flat[lo:hi] for lo, hi in zip([0, *ends], ends, strict=False)]
        self.lines: list[dict[str, Any]] = []
        self.anchors: list[np.ndarray[Any, Any]] = []
        self.said: list[list[tm.RoundReady]] = []
        self.readies: dict[int, tm.RunReady] = {}
        self._epoch, self._round = 0, 1
        self._cursors, self._leased = [0] * self.world, [0] * self.world
        self._ready: dict[int, tm.RoundReady] = {}
        self._results: dict[int, tm.RoundResult] = {}
        self._values: dict[str, bytes] = {}
        self._gone: set[int] = set()
        self._over = threading.Event()
        self.digest = b""
        """Of the anchor."""
        for rank in range(self.world):
            self._home(rank).mkdir()

    # -- the trainers ----------------------------------------------------------------------------------------

    def run(self, script: Callable[[Peer, int], Any]) -> list[Any]:
        """What ``script(peer, rank)`` returns, by rank; the first error of a script or an agent is raised."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 handed to the test's thread
                errors.append(error)
                self._over.set()

        def trainer(rank: int) -> None:
            with dmc.connect({tm.ENV_AGENT: self._endpoint(rank), tm.ENV_RUN: RUN}) as peer:
                results[rank] = script(peer, rank)

        works = [self._serve, *(lambda rank=rank: trainer(rank) for rank in range(self.world))]
        threads = [threading.Thread(target=guarded, args=[work], daemon=True) for work in works]
        deadline_s = time.monotonic() + DEADLINE_S
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "the run did not end"
        return results

    def _endpoint(self, rank: int) -> str:
        return f"ipc://{self.folder}/agent{rank}"

    def _home(self, rank: int) -> Path:
        return self.folder / f"home{rank}"

    # -- the agents ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        with zmq.Context() as context:
            self._sockets = [context.socket(zmq.ROUTER) for _ in range(self.world)]
            self._names = [b""] * self.world
            poller = zmq.Poller()
            for rank, socket in enumerate(self._sockets):
                socket.linger = 1000
                socket.bind(self._endpoint(rank))
                poller.register(socket, zmq.POLLIN)
            try:
                self._play(poller)
            finally:
                for rank, socket in enumerate(self._sockets):
                    if self._names[rank] and rank not in self._gone:
                        self._send(rank, tm.TrainerRefused(reason="the agents' part failed"))
                    socket.close()

    def _play(self, poller: zmq.Poller) -> None:
        while len(self._gone) < self.world and not self._over.is_set():
            ready = dict(poller.poll(PATIENCE_MS))
            assert ready, "no trainer said anything"
            for rank, socket in enumerate(self._sockets):
                if socket in ready:
                    self._names[rank], data = socket.recv_multipart()
                    self._hear(rank, codec.decode(data))

    def _send(self, rank: int, message: Any) -> None:
        self._sockets[rank].send_multipart([self._names[rank], codec.encode(message)])

    def _hear(self, rank: int, message: Any) -> None:
        match message:
            case tm.TrainerHello():
                self._welcome(rank)
            case tm.DatasetRequest():
                path = self.folder / "store" / self.manifest.digest.hex() / "manifest.msgpack"
                self._send(
                    rank,
                    tm.DatasetReady(name=message.name, digest=self.manifest.digest, manifest_path=str(path)),
                )
            case tm.RunReady():
                self.readies[rank] = message
                if len(self.readies) == self.world:
                    assert len({(r.parameters, r.tau_policy, r.outer) for r in self.readies.values()}) == 1
                    self._send(0, tm.WriteInitial(slot_path=self._slot(0)))
            case tm.InitialWritten():
                self._begin(message.digest)
            case tm.StoreSet():
                self._values[message.key] = message.value
                for other in range(self.world):
                    self._tell_value(other, message.view_id, message.key)
            case tm.StoreGet():
                self._tell_value(rank, message.view_id, message.key)
            case tm.LeaseRequest():
                self._lease(rank, message.samples)
            case tm.RoundReady():
                self._barrier(rank, message)
            case tm.RoundResult():
                self._result(rank, message)
            case tm.TrainerBye():
                self._gone.add(rank)
            case _:
                raise AssertionError(message)

    def _welcome(self, rank: int) -> None:
        self._send(
            rank,
            tm.TrainerWelcome(
                peer_id=f"p{rank}",
                name=f"peer {rank}",
                home=str(self._home(rank)),
                store_root=str(self.folder / "store"),
                collective_host="127.0.0.1",
                checkpoint_every_s=3600.0,
            ),
        )

    def _slot(self, rank: int) -> str:
        return str(self._home(rank) / f"slot{self._round % SLOTS}")

    def _begin(self, digest: bytes) -> None:
        initial = Path(self._slot(0)).read_bytes()
        self.digest = digest
        self.anchors.append(np.frombuffer(initial, "<f4"))
        for rank in range(self.world):
            Path(self._slot(rank)).write_bytes(initial)
            self._send(
                rank,
                tm.ViewStarted(
                    view_epoch=1,
                    view_id=b"the only view",
                    history=b"history of 16 by",
                    replaced=(),
                    rank=rank,
                    world=self.world,
                    next_round=self._round,
                    slot_path=self._slot(rank),
                    digest=digest,
                    tau=self.tau,
                    epoch=0,
                    local=tm.Local.RESET,
                    backend="gloo",
                    group_timeout_ms=PATIENCE_MS,
                ),
            )

    def _tell_value(self, rank: int, view_id: bytes, key: str) -> None:
        if key in self._values and self._names[rank]:
            self._send(rank, tm.StoreValue(view_id=view_id, key=key, value=self._values[key]))

    def _lease(self, rank: int, samples: int) -> None:
        if self._epoch == self.epochs:
            return  # RunFinished is on its way
        lo = self._leased[rank]
        places = self.assigned[rank][lo : lo + samples]
        self._leased[rank] += len(places)
        if places:
            self._send(rank, tm.Lease(epoch=self._epoch, braids=tuple(braids_of(places))))
        else:
            self._send(rank, tm.LeaseEnd(epoch=self._epoch, finished=False))

    def _barrier(self, rank: int, said: tm.RoundReady) -> None:
        assert (said.view_epoch, said.round, said.skipped) == (1, self._round, ())
        self._ready[rank] = said
        if len(self._ready) < self.world:
            return
        divisor = sum(self._weights())
        if not divisor:
            self._complete(self.digest)
            return
        self._round += 1  # of the slot's name
        for member, weight in enumerate(self._weights()):
            path = self._slot(member)
            reduce = tm.Reduce(view_epoch=1, round=said.round, weight=weight, divisor=divisor, slot_path=path)
            self._send(member, reduce)
        self._round -= 1

    def _weights(self) -> list[int]:
        said = [self._ready[rank] for rank in range(self.world)]
        return [ready.samples if ready.finite else 0 for ready in said]

    def _result(self, rank: int, result: tm.RoundResult) -> None:
        self._results[rank] = result
        if len(self._results) == self.world:
            [digest] = {result.digest for result in self._results.values()}  # the same bits on all of them
            self._complete(digest)

    def _complete(self, digest: bytes) -> None:
        weights, number = self._weights(), self._round
        counted: list[Any] = []
        for rank, weight in enumerate(weights):
            lo = self._cursors[rank]
            counted += braids_of(self.assigned[rank][lo : lo + weight])
            self._cursors[rank] += weight
            if not self._ready[rank].finite:
                self._leased[rank] = self._cursors[rank]
        divisor = sum(weights)
        losses = [self._ready[rank].loss_sum_micro for rank in range(self.world)]
        self.lines.append(
            {
                "view_epoch": 1,
                "round": number,
                "epoch": self._epoch,
                "weights": weights,
                "counted": counted,
                "digest": digest.hex(),
                "loss": sum(losses) / divisor / 1e6 if divisor else None,
            }
        )
        self.said.append([self._ready[rank] for rank in range(self.world)])
        if self._cursors == list(map(len, self.assigned)):
            self._epoch += 1
            self._cursors, self._leased = [0] * self.world, [0] * self.world
        self._round += 1
        self._tell_complete(number, digest, changed=divisor > 0)

    def _tell_complete(self, number: int, digest: bytes, changed: bool) -> None:
        ready, self._ready, self._results, self.digest = self._ready, {}, {}, digest
        if changed:
            data = Path(self._slot(0)).read_bytes()
            assert xxhash.xxh3_128(data).digest() == digest
            self.anchors.append(np.frombuffer(data, "<f4"))
        else:
            self.anchors.append(self.anchors[-1])
            for rank in range(self.world):
                os.replace(self._home(rank) / f"slot{number % SLOTS}", self._slot(rank))
        for rank in range(self.world):
            self._send(
                rank,
                tm.RoundComplete(
                    view_epoch=1,
                    round=number,
                    steps=self.tau,
                    limit_us=0,
                    epoch=self._epoch,
                    reset=not ready[rank].finite,
                    retake=False,
                ),
            )
            if self._epoch == self.epochs:
                path = self._slot(rank)
                self._send(rank, tm.RunFinished(slot_path=path, digest=digest, final_path="final"))


def braids_of(places: Sequence[Place]) -> list[tuple[tuple[int, int, int]]]:
    """Neighbours joined: one stretch each."""
    found: list[tuple[tuple[int, int, int]]] = []
    for shard, at in places:
        if found and found[-1][0][0] == shard and found[-1][0][2] == at:
            found[-1] = ((shard, found[-1][0][1], at + 1),)
        else:
            found.append(((shard, at, at + 1),))
    return found
