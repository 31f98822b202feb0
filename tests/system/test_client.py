"""Asking over a socket: replies in pieces, hosts that refuse, things that are no agents."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from p2p_dmc.agent import requests
from p2p_dmc.agent.agent import Agent
from p2p_dmc.agent.client import NoAnswerError, ask, ask_local
from p2p_dmc.agent.requests import Requests
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.errors import UserError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import ClientReply, ClientRequest, SubmitEnded
from p2p_dmc.wire.transport import Envelope

ME = codec.encode(Envelope(peer_id="a" * 32, boot=1, address="tcp://127.0.0.1:1", run="", to=""))
Answer = Callable[[ClientRequest], list[bytes]]


@pytest.fixture
def served() -> Iterator[Callable[[Answer], str]]:
    """Starts one agent-like thing that answers each request with some messages; its address."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    threads = []

    def serve(answer: Answer) -> str:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def loop() -> None:
            try:
                while True:
                    frames = router.recv_multipart()
                    request = codec.decode(frames[-1])
                    assert isinstance(request, ClientRequest)
                    for message in answer(request):
                        router.send_multipart([frames[0], ME, message])
            except zmq.ContextTerminated:
                router.close(0)

        threads.append(threading.Thread(target=loop))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield serve
    context.term()
    for thread in threads:
        thread.join(10)


def reply(body: str, *, ok: bool = True, more: bool = False) -> bytes:
    return codec.encode(ClientReply(ok=ok, body=body, more=more))


def test_an_answer_in_one_piece_and_in_several(served: Callable[[Answer], str]) -> None:
    def answer(request: ClientRequest) -> list[bytes]:
        body = json.dumps({"command": request.command, "arguments": request.arguments})
        pieces = [body] if request.command == "one" else list(body)
        return [reply(piece, more=i < len(pieces) - 1) for i, piece in enumerate(pieces)]

    address = served(answer)
    for command in ("one", "several"):
        assert ask([address], command, ["x", "y"]) == {"command": command, "arguments": ["x", "y"]}


def test_a_no_is_the_agents_own_words(served: Callable[[Answer], str]) -> None:
    with pytest.raises(UserError, match=r"^no run 'x'; see status$"):
        ask([served(lambda _: [reply("no run 'x'; see status", ok=False)])], "stop", ["x"])


@pytest.mark.parametrize(
    "message", [b"HTTP/1.1 400", reply("not json"), reply("[1]"), codec.encode(SubmitEnded(code=0, line=""))]
)
def test_what_is_no_agent(served: Callable[[Answer], str], message: bytes) -> None:
    with pytest.raises(UserError, match="no agent of this version"):
        ask([served(lambda _: [message])], "status")


def test_the_next_address_is_asked_when_one_refuses_or_is_silent(served: Callable[[Answer], str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # does not listen: the host refuses
        refusing = f"tcp://127.0.0.1:{bound.getsockname()[1]}"
        silent, good = served(lambda _: []), served(lambda _: [reply("{}")])
        started_s = time.monotonic()
        assert ask([refusing, good], "status") == {}
        assert time.monotonic() - started_s < 4, "a refusal needs no time-out"
        assert ask([refusing, silent, good], "status", timeout_s=0.3) == {}
        with pytest.raises(
            NoAnswerError, match=f"no peer answers at {refusing}, {silent}; check the address"
        ):
            ask([refusing, silent], "status", timeout_s=0.3)


def test_a_local_agent_that_is_gone() -> None:
    with pytest.raises(NoAnswerError, match=r"the agent of this home does not answer within 0\.3 s"):
        ask_local("ipc:///tmp/no-such-folder/agent", "status", timeout_s=0.3)


def test_a_large_reply_is_cut_into_pieces_that_fit_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PIECE_CHARACTERS", 10)
    facts = {"datasets": ["é" * 50, 1]}
    answering = Requests(cast(Agent, None))
    monkeypatch.setattr(answering, "_facts", lambda request, local: facts)
    got: list[ClientReply] = []
    answering.handle(ClientRequest(command="placement", arguments=()), got.append, local=False)
    assert len(got) > 10 and all(len(r.body) <= 10 and r.ok for r in got)
    assert [r.more for r in got] == [True] * (len(got) - 1) + [False]
    assert json.loads("".join(r.body for r in got)) == facts


def test_what_takes_long_is_worked_out_while_the_agent_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    began, went_on = threading.Event(), threading.Event()
    facts = {"a": [{"b": list(range(2500)), "c": {}}, {}], "d": [], "é": None, "f": [[1, {"g": "h"}]] * 1001}

    def slowly() -> dict[str, Any]:
        began.set()
        assert went_on.wait(20.0)
        return facts

    async def work() -> None:
        tasks = Tasks(lambda error: None)
        answering = Requests(cast(Agent, SimpleNamespace(spawn=tasks.spawn)))
        monkeypatch.setattr(answering, "_facts", lambda request, local: slowly)
        got: list[ClientReply] = []
        answering.handle(ClientRequest(command="placement", arguments=()), got.append, local=False)
        assert await asyncio.to_thread(began.wait, 20.0)
        assert not got
        went_on.set()
        while tasks:
            await asyncio.sleep(0.001)
        assert "".join(r.body for r in got) == json.dumps(facts)

    asyncio.run(asyncio.wait_for(work(), 30.0))


def test_an_unknown_command_and_one_that_only_this_machine_may_give() -> None:
    answering, got = Requests(cast(Agent, None)), cast(list[Any], [])
    for command in ("format-disk", "leave-run"):
        answering.handle(ClientRequest(command=command, arguments=("x",)), got.append, local=False)
    assert [r.ok for r in got] == [False, False] and "format-disk" in got[0].body
