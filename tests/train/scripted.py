"""An agent that does what a test tells it, over a real ROUTER socket; the trainer under test runs in the test
itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
import zmq

from p2p_dmc.data.formats import scan
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards
from p2p_dmc.wire import codec
from p2p_dmc.wire import trainer_messages as tm

T = TypeVar("T")
Stretch = tuple[int, int, int]

PATIENCE_MS = 20_000


class ScriptedAgent:
    """Use as a context manager with the script to run beside the trainer; the script's failure fails the
    test.

    The data set "numbers" has ten samples in some shards: ``<i>.txt`` holds the number i.
    """

    def __init__(self, folder: Path, source: Path | None = None, shard_bytes: int = 5000) -> None:
        self.folder = folder
        if source is None:
            source = folder / "source"
            source.mkdir()
            for index in range(10):
                (source / f"s{index}.txt").write_text(str(index))
        self.store = Store(folder / "store")
        found = scan(source)
        shards = plan_shards(found, max_shard_size=shard_bytes)
        self.manifest = write_shards(
            shards, self.store, scan=found, name="numbers", mode="file", replicas=1, seed=0
        )
        self.environment = {tm.ENV_AGENT: f"ipc://{folder}/agent", tm.ENV_RUN: "test"}
        self.home = folder
        self.checkpoint_every_s = 60.0
        self.history = b"history of 16 by"
        self.replaced: tuple[bytes, ...] = ()
        self.view_epoch = 0
        self.round = 1
        self.parameters: tuple[tm.ParameterSpec, ...] = ()
        self._slots = 0
        self._trainer = b""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def play(self, script: Callable[[ScriptedAgent], None]) -> ScriptedAgent:
        self._thread = threading.Thread(target=self._run, args=[script], daemon=True)
        return self

    def __enter__(self) -> ScriptedAgent:
        assert self._thread is not None
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._thread is not None
        self._thread.join(PATIENCE_MS / 1000)
        if self._error is not None:
            raise self._error
        assert kind is not None or not self._thread.is_alive()

    def _run(self, script: Callable[[ScriptedAgent], None]) -> None:
        context = zmq.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 2000
        self._socket.bind(self.environment[tm.ENV_AGENT])
        try:
            script(self)
        except BaseException as error:  # noqa: BLE001 handed to the test's thread
            self._error = error
            self.send(tm.TrainerRefused(reason=f"the scripted agent failed: {error!r}"))
        finally:
            self._socket.close()
            context.term()

    # -- words -----------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self._socket.send_multipart([self._trainer, codec.encode(message)])

    def receive(self) -> Any:
        """The trainer's next message; rendezvous, which goes on by itself, is passed over."""
        while True:
            assert self._socket.poll(PATIENCE_MS), "the trainer said nothing"
            self._trainer, data = self._socket.recv_multipart()
            message = codec.decode(data)
            if not isinstance(message, tm.StoreSet | tm.StoreGet):
                return message

    def expect(self, kind: type[T]) -> T:
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def slot(self, values: Any = None) -> str:
        self._slots += 1
        path = self.folder / f"slot{self._slots}"
        if values is not None:
            path.write_bytes(np.asarray(values, dtype="<f4").tobytes())
        return str(path)

    # -- sentences -------------------------------------------------------------------------------------------

    def welcome(self) -> tm.TrainerHello:
        hello = self.expect(tm.TrainerHello)
        self.send(
            tm.TrainerWelcome(
                peer_id="p1",
                name="one",
                home=str(self.home),
                store_root=str(self.folder / "store"),
                collective_host="127.0.0.1",
                checkpoint_every_s=self.checkpoint_every_s,
            )
        )
        return hello

    def dataset(self) -> None:
        request = self.expect(tm.DatasetRequest)
        digest = self.manifest.digest
        path = self.folder / "store" / digest.hex() / "manifest.msgpack"
        self.send(tm.DatasetReady(name=request.name, digest=digest, manifest_path=str(path)))

    def initial(self) -> np.ndarray[Any, Any]:
        """From RunReady to the initial parameters that the trainer wrote."""
        ready = self.expect(tm.RunReady)
        self.parameters = ready.parameters
        path = self.slot()
        self.send(tm.WriteInitial(slot_path=path))
        written = self.expect(tm.InitialWritten)
        assert written.digest == xxhash.xxh3_128(Path(path).read_bytes()).digest()
        return self.read(path)

    def begin(self, anchor: Any = None, **view: Any) -> np.ndarray[Any, Any]:
        """Everything up to the first view; the anchor is the trainer's own unless given."""
        self.welcome()
        self.dataset()
        written = self.initial()
        start = written if anchor is None else np.asarray(anchor, dtype="<f4")
        self.view(start, **view)
        return start

    def view(
        self,
        anchor: Any,
        local: tm.Local = tm.Local.RESET,
        *,
        tau: int = 2,
        epoch: int = 0,
        world: int = 1,
        backend: str = "gloo",
        slot: str = "",
        **more: Any,
    ) -> None:
        """``slot``: where the anchor is already; else it is written into a new one."""
        self.view_epoch += 1
        path = slot or self.slot(anchor)
        self.send(
            tm.ViewStarted(
                view_epoch=self.view_epoch,
                view_id=b"view%d" % self.view_epoch,
                history=self.history,
                replaced=self.replaced,
                rank=0,
                world=world,
                next_round=self.round,
                slot_path=path,
                digest=xxhash.xxh3_128(Path(path).read_bytes()).digest(),
                tau=tau,
                epoch=epoch,
                local=local,
                backend=backend,
                group_timeout_ms=2000,
                **more,
            )
        )

    def lease(self, *stretches: Stretch, epoch: int = 0) -> tm.LeaseRequest:
        request = self.expect(tm.LeaseRequest)
        self.send(tm.Lease(epoch=epoch, braids=tuple((one,) for one in stretches)))
        return request

    def end(self, epoch: int = 0, finished: bool = False) -> None:
        self.expect(tm.LeaseRequest)
        self.send(tm.LeaseEnd(epoch=epoch, finished=finished))

    def reduce(
        self, weight: int, divisor: int, outer: tuple[float, ...] = ()
    ) -> tuple[np.ndarray[Any, Any], tm.RoundResult]:
        path = self.slot()
        self.send(
            tm.Reduce(
                view_epoch=self.view_epoch,
                round=self.round,
                weight=weight,
                divisor=divisor,
                slot_path=path,
                outer=outer,
            )
        )
        result = self.expect(tm.RoundResult)
        assert (result.view_epoch, result.round) == (self.view_epoch, self.round)
        assert result.digest == xxhash.xxh3_128(Path(path).read_bytes()).digest()
        return self.read(path), result

    def complete(
        self,
        tau: int = 2,
        epoch: int = 0,
        reset: bool = False,
        retake: bool = False,
        limit_us: int = 0,
        **more: Any,
    ) -> None:
        self.send(
            tm.RoundComplete(
                view_epoch=self.view_epoch,
                round=self.round,
                steps=tau,
                limit_us=limit_us,
                epoch=epoch,
                reset=reset,
                retake=retake,
                **more,
            )
        )
        self.round += 1

    def refuse(self) -> None:
        self.send(tm.RoundRefused(view_epoch=self.view_epoch, round=self.round))

    def finish(self, anchor: Any) -> None:
        path = self.slot(anchor)
        digest = xxhash.xxh3_128(Path(path).read_bytes()).digest()
        self.send(tm.RunFinished(slot_path=path, digest=digest, final_path="final/model.safetensors"))

    def lead(self, epochs: int, tau: int = 2) -> list[tm.RoundReady]:
        """A whole run alone: every sample of every epoch once. What the trainer said of each round."""
        anchor, said = self.begin(tau=tau), []
        for epoch in range(epochs):
            stretches = [(shard, 0, count) for shard, count in enumerate(self.manifest.sample_counts)]
            left = len(self.manifest)
            while left:
                message = self.receive()
                if isinstance(message, tm.LeaseRequest) and stretches:
                    self.send(tm.Lease(epoch=epoch, braids=((stretches.pop(0),),)))
                elif isinstance(message, tm.LeaseRequest):
                    self.send(tm.LeaseEnd(epoch=epoch, finished=False))
                else:
                    assert isinstance(message, tm.RoundReady), message
                    said.append(message)
                    left -= message.samples
                    anchor, _ = self.reduce(message.samples, message.samples)
                    self.complete(tau=tau, epoch=epoch + (left == 0))
        self.end(epoch=epochs, finished=True)
        self.finish(anchor)
        return said

    def read(self, path: str) -> np.ndarray[Any, Any]:
        return np.fromfile(path, dtype="<f4")
