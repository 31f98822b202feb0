"""Asking an agent, from a command: over tcp:// by address, or over ipc:// on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import ClientReply, ClientRequest, SubmitScript
from p2p_dmc.wire.transport import Envelope, normalise_address, split_address

TIMEOUT_S = 5.0


def _dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IPV6, 1)
    dealer.connect(endpoint)
    return dealer


def ask(addresses: Sequence[str], command: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The facts that the first answering agent gives; UserError when none does or it says no."""
    request = codec.encode(ClientRequest(command=command, arguments=tuple(arguments)))
    nobody = codec.encode(Envelope(peer_id="", boot=0, address="", run=""))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for address in addresses:
            split_address(address)
            dealer = _dealer(context, normalise_address(address))
            dealer.send_multipart([nobody, request])
            if dealer.poll(int(TIMEOUT_S * 1000)):
                return _facts(dealer.recv_multipart()[-1])
            dealer.close(0)
    finally:
        context.destroy(0)
    listed = ", ".join(addresses)
    raise UserError(f"no peer answers at {listed} within {TIMEOUT_S:g} s; check the address and that it runs there")


def ask_local(endpoint: str, command: str, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """The same of the agent of a home on this machine."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = _dealer(context, endpoint)
        dealer.send(codec.encode(ClientRequest(command=command, arguments=tuple(arguments))))
        if not dealer.poll(int(TIMEOUT_S * 1000)):
            raise UserError(f"the agent of this home does not answer within {TIMEOUT_S:g} s; is it stopped?")
        return _facts(dealer.recv())
    finally:
        context.destroy(0)


def _facts(data: bytes) -> dict[str, Any]:
    try:
        reply = codec.decode(data)
    except RemoteProtocolError as error:
        raise UserError(f"what answers there is no agent of this version ({error})") from None
    if not isinstance(reply, ClientReply):
        raise UserError("what answers there is no agent of this version")
    if not reply.ok:
        raise UserError(reply.body)
    facts: dict[str, Any] = json.loads(reply.body)
    return facts


def submit(endpoint: str, script: SubmitScript) -> Iterator[object]:
    """Hand a script to a running agent and hear its messages until SubmitEnded; UserError when the agent goes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = _dealer(context, endpoint)
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        dealer.send(codec.encode(script))
        while True:
            ready = dict(poller.poll())
            if dealer in ready:
                yield codec.decode(dealer.recv())
            elif monitor in ready:
                raise UserError("the agent of this home has gone; its last lines are in agent.log")
    finally:
        context.destroy(0)
