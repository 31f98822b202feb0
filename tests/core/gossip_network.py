"""A network of Membership cores under a virtual clock: seeded, with delays, losses, cuts, pauses, crashes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from p2p_dmc.core.membership import (
    MemberEvent,
    MemberRecord,
    Membership,
    MembershipMessage,
    MembershipSettings,
    MemberState,
    Output,
    Role,
    Send,
    Sender,
)


def peer_id_of(number: int) -> str:
    """Scattered, so that the ring order is not the order of birth."""
    return f"{random.Random(number).getrandbits(128):032x}"


def address_of(number: int) -> str:
    return f"tcp://10.0.{number // 250}.{number % 250 + 1}:7400"


def record_of(number: int, **facts: object) -> MemberRecord:
    values: dict[str, object] = {
        "peer_id": peer_id_of(number),
        "boot": 1,
        "incarnation": 0,
        "state": MemberState.ALIVE,
        "name": f"peer{number}",
        "address": address_of(number),
        "bulk_address": "",
        "role": Role.TRAIN,
        "meta": b"",
    }
    return MemberRecord(**{**values, **facts})  # type: ignore[arg-type]


def sender_of(number: int, boot: int = 1, incarnation: int = 0) -> Sender:
    return Sender(peer_id=peer_id_of(number), boot=boot, incarnation=incarnation, address=address_of(number))


@dataclass
class Node:
    core: Membership
    address: str
    up: bool = True
    paused_until_ms: int = 0
    tick_ms: int = 0
    events: list[tuple[int, MemberEvent]] = field(default_factory=list)

    @property
    def peer_id(self) -> str:
        return self.core.me.peer_id

    def state_of(self, other: Node | str) -> MemberState | None:
        record = self.core.get(other if isinstance(other, str) else other.peer_id)
        return None if record is None else record.state

    def reasons(self, other: Node, new: MemberState) -> list[str]:
        return [e.reason for _, e in self.events if e.peer_id == other.peer_id and e.new is new]


class Network:
    """Messages take 1 to 5 ms by default. `refuses`: addresses whose live host refuses connections."""

    def __init__(
        self,
        seed: int = 0,
        *,
        settings: MembershipSettings | None = None,
        delay_ms: tuple[int, int] = (1, 5),
        loss: float = 0.0,
    ) -> None:
        self.now_ms = 1_000_000
        self.rng = random.Random(seed)
        self.settings = settings or MembershipSettings.lan()
        self.delay_ms = delay_ms
        self.loss = loss
        self.nodes: list[Node] = []
        self.by_address: dict[str, Node] = {}
        self.refuses: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.on_send: Callable[[Send], None] | None = None
        self.ticks = 0
        self.sends = 0
        self.lost = 0
        self.sent_bytes = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0

    def add(self, number: int, *seeds: int, **facts: object) -> Node:
        """Start a peer; under an address in use the new one takes it over."""
        record = record_of(number, **facts)
        core = Membership(
            record,
            tuple(address_of(seed) for seed in seeds),
            self.settings,
            random.Random(self.rng.getrandbits(64)),
            self.now_ms,
        )
        node = Node(core, record.address)
        if record.address in self.by_address:
            self.by_address[record.address].up = False
        self.by_address[record.address] = node
        self.refuses.discard(record.address)
        self.nodes.append(node)
        self._schedule_tick(node)
        return node

    def cluster(self, size: int) -> list[Node]:
        """Peers 0 to size - 1, all seeded by peer 0, run until everybody knows everybody."""
        nodes = [self.add(number, 0) for number in range(size)]
        self.run_until(lambda: self.agree(nodes, MemberState.ALIVE, nodes), 15_000)
        return nodes

    def kill(self, node: Node, *, refuses: bool = False) -> None:
        """From here on it is silent; with refuses its host answers connections with a reset."""
        node.up = False
        if refuses:
            self.refuses.add(node.address)

    def pause(self, node: Node, duration_ms: int) -> None:
        """SIGSTOP: what arrives waits."""
        node.paused_until_ms = self.now_ms + duration_ms

    def cut_between(self, these: Iterable[Node], those: Iterable[Node], *, both: bool = True) -> None:
        """Nothing goes from these to those any more, and back neither if both."""
        for this in these:
            for that in list(those):
                self.cut.add((this.address, that.address))
                if both:
                    self.cut.add((that.address, this.address))

    def heal(self) -> None:
        self.cut.clear()

    def act(self, node: Node, output: Output) -> None:
        """Carry out what a core asked for."""
        node.core.check_invariants()
        node.events += [(self.now_ms, event) for event in output.events]
        for send in output.sends:
            self.sends += 1
            if self.on_send is not None:
                self.on_send(send)
            self.sent_bytes += wire_size(send.message)
            self._carry(node, send.address, send.message)
        self._schedule_tick(node)

    def run(self, duration_ms: int) -> None:
        self._run(self.now_ms + duration_ms, lambda: False)

    def run_until(self, goal: Callable[[], bool], within_ms: int) -> int:
        """Milliseconds until goal held; AssertionError if that took longer than within_ms."""
        start_ms = self.now_ms
        self._run(start_ms + within_ms, goal)
        assert goal(), f"not reached within {within_ms} ms"
        return self.now_ms - start_ms

    @staticmethod
    def agree(nodes: Iterable[Node], state: MemberState | None, about: Iterable[Node | str]) -> bool:
        subjects = list(about)
        return all(node.state_of(subject) == state for node in nodes for subject in subjects)

    def _run(self, end_ms: int, goal: Callable[[], bool]) -> None:
        while self._queue and self._queue[0][0] <= end_ms:
            at_ms = self._queue[0][0]
            if at_ms > self.now_ms and goal():
                return
            self.now_ms = at_ms
            heapq.heappop(self._queue)[2]()
        if not goal():
            self.now_ms = end_ms

    def _at(self, at_ms: int, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._queue, (at_ms, self._order, action))

    def _schedule_tick(self, node: Node) -> None:
        due_ms = node.core.next_deadline_ms(self.now_ms)
        assert due_ms >= self.now_ms
        if node.tick_ms <= self.now_ms or due_ms < node.tick_ms:
            node.tick_ms = due_ms
            self._at(due_ms, lambda: self._tick(node, due_ms))

    def _tick(self, node: Node, planned_ms: int) -> None:
        if not node.up or node.tick_ms != planned_ms:
            return
        if self.now_ms < node.paused_until_ms:
            wake_ms = node.tick_ms = node.paused_until_ms
            self._at(wake_ms, lambda: self._tick(node, wake_ms))
            return
        if node.core.next_deadline_ms(self.now_ms) <= self.now_ms:
            node.tick_ms = 0
            self.ticks += 1
            self.act(node, node.core.tick(self.now_ms))
        else:
            node.tick_ms = 0
            self._schedule_tick(node)

    def _carry(self, source: Node, address: str, message: MembershipMessage) -> None:
        if (source.address, address) in self.cut or self.rng.random() < self.loss:
            self.lost += 1
            return
        arrive_ms = self.now_ms + self.rng.randint(*self.delay_ms)
        if address in self.refuses:
            self._at(arrive_ms, lambda: self._refuse(source, address))
        else:
            self._at(arrive_ms, lambda: self._deliver(address, message))

    def _refuse(self, source: Node, address: str) -> None:
        if not source.up:
            return
        for record in source.core.members():
            if record.address == address:
                self.act(source, source.core.refused(record.peer_id, record.boot, self.now_ms))

    def _deliver(self, address: str, message: MembershipMessage) -> None:
        node = self.by_address.get(address)
        if node is None or not node.up:
            self.lost += 1
        elif self.now_ms < node.paused_until_ms:
            self._at(node.paused_until_ms, lambda: self._deliver(address, message))
        else:
            self.act(node, node.core.receive(message, self.now_ms))


def wire_size(message: MembershipMessage) -> int:
    """About what msgpack and framing would make of it: 60 bytes of head and numbers, then the texts."""
    size = 60 + len(message.sender.peer_id) + len(message.sender.address)
    for record in message.records:
        texts = (record.peer_id, record.name, record.address, record.bulk_address, *record.accusers)
        size += 20 + sum(map(len, texts)) + len(record.meta)
    return size
