"""Asking an agent, from a command: over tcp:// by address, or over ipc:// on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import ClientReply, ClientRequest, SubmitEnded, SubmitScript
from p2p_dmc.wire.transport import Envelope, normalise_address

TIMEOUT_S = 5.0

Context = zmq.Context[zmq.Socket[bytes]]


class NoAnswerError(UserError):
    """Nobody answers there; another address may."""


def ask(
    addresses: Sequence[str], command: str, arguments: Sequence[str] = (), *, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """The facts that the first answering agent gives.

    Each address gets ``timeout_s``, unless its host refuses. UserError when the agent says no, NoAnswerError when no
    agent answers.
    """
    request = codec.encode(ClientRequest(command=command, arguments=tuple(arguments)))
    nobody = codec.encode(Envelope(peer_id="", boot=0, address="", run="", to=""))
    context: Context = zmq.Context()
    try:
        for address in addresses:
            body = _exchange(context, normalise_address(address), [nobody, request], timeout_s)
            if body is not None:
                return _facts(body)
    finally:
        context.destroy(0)
    raise NoAnswerError(
        f"no peer answers at {', '.join(addresses)}; check the address and that one runs there"
    )


def ask_local(
    endpoint: str, command: str, arguments: Sequence[str] = (), *, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """The same of the agent of a home on this machine."""
    request = codec.encode(ClientRequest(command=command, arguments=tuple(arguments)))
    context: Context = zmq.Context()
    try:
        body = _exchange(context, endpoint, [request], timeout_s)
    finally:
        context.destroy(0)
    if body is None:
        raise NoAnswerError(f"the agent of this home does not answer within {timeout_s:g} s; is it stopped?")
    return _facts(body)


def _exchange(context: Context, endpoint: str, request: list[bytes], timeout_s: float) -> str | None:
    """The whole body of the reply; None when nobody listens there or nothing comes in time."""
    dealer = _dealer(context)
    monitor = dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED)
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    deadline_s = time.monotonic() + timeout_s
    parts: list[str] = []
    try:
        dealer.connect(endpoint)
        dealer.send_multipart(request)
        while (left_s := deadline_s - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left_s * 1000) + 1))
            if dealer in ready:
                reply = _reply(dealer.recv_multipart()[-1])
                parts.append(reply.body)
                if not reply.more:
                    return "".join(parts)
            elif monitor in ready:
                return None  # refused, or cut off: trying again is the caller's choice
    finally:
        dealer.disable_monitor()
        dealer.close(0)
    return None


def _dealer(context: Context) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
    return dealer


def _reply(data: bytes) -> ClientReply:
    try:
        reply = codec.decode(data)
    except RemoteProtocolError as error:
        raise UserError(f"what answers there is no agent of this version ({error})") from None
    if not isinstance(reply, ClientReply):
        raise UserError("what answers there is no agent of this version")
    if not reply.ok:
        raise UserError(reply.body)
    return reply


def _facts(body: str) -> dict[str, Any]:
    try:
        facts = json.loads(body)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise UserError("what answers there is no agent of this version")
    return facts


class Submission:
    """A script handed to the running agent of a home on this machine."""

    def __init__(self, endpoint: str, script: SubmitScript) -> None:
        self._context: Context = zmq.Context()
        self._dealer = _dealer(self._context)
        self._run = script.run
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._dealer.connect(endpoint)
        self._dealer.send(codec.encode(script))

    def receive(self) -> object:
        """The agent's next message: LocalLine, and at last SubmitEnded. UserError when the agent has gone."""
        while True:
            ready = dict(self._poller.poll())
            if self._dealer in ready:
                message = codec.decode(self._dealer.recv())
                if not isinstance(message, ClientReply):
                    return message
                if not message.ok:
                    return SubmitEnded(code=1, line=message.body)
            elif self._monitor in ready:
                parse_monitor_message(self._monitor.recv_multipart())
                raise UserError("the agent of this home has gone; its last lines are in agent.log")

    def leave(self) -> None:
        """Ask that this peer leaves the run; the agent itself goes on."""
        request = ClientRequest(command="leave-run", arguments=(self._run,))
        self._dealer.send(codec.encode(request))

    def close(self) -> None:
        self._context.destroy(0)
