"""Peers that are each a host of their own: a network namespace with a cable (bin/netlab), and a disk (tmpfs)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from p2p_dmc.observe.phases import ENV_ORDERS
from tests.system.cluster import Cluster, Peer

ROOT = Path(__file__).resolve().parents[2]
NETLAB = ROOT / "bin" / "netlab"
PORT = 7400
RATE = "100mbit"
DISK_BYTES = 48 << 20
LOSS_TABLE = "chaos"


def missing_tools() -> str:
    """What this machine lacks for hosts of their own, in one line; "" when nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc", "mount", "umount") if shutil.which(tool) is None]
    return f"{', '.join(lacking)} not found" if lacking else ""


def can_lose() -> bool:
    """Whether packets can be dropped at random here."""
    return shutil.which("nft") is not None


class Hosts(Cluster):
    """A cluster on a lab of its own. ``close`` removes the lab and the disks."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        super().__init__(root)
        self.lab = f"c{os.getpid() % 10**8}"
        self.host = {name: f"h{i}" for i, name in enumerate(names, start=1)}
        self.orders = root / "orders"
        self._mounted: list[Path] = []
        self._repeated: dict[str, int] = {}
        self._silences = 0
        self._netlab("up", str(len(names)), "--rate", RATE)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            for path in self._mounted:
                subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)
            self._netlab("down")

    def _netlab(self, command: str, *words: str) -> str:
        line = [sys.executable, str(NETLAB), command, *words, "--name", self.lab]
        return subprocess.run(
            line, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        ).stdout

    def inside(self, peer: Peer) -> list[str]:
        """Words that run a command on the peer's host."""
        return ["ip", "netns", "exec", f"{self.lab}-{self.host[peer.name]}"]

    def peer(self, name: str) -> Peer:
        """As the cluster's, with a disk, orders and a host of its own."""
        new = all(p.name != name for p in self.peers)
        peer = super().peer(name)
        if new:
            peer.home.mkdir()
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(peer.home)], check=True
            )
            self._mounted.append(peer.home)
            (self.orders / name).mkdir(parents=True)
            peer.environment[ENV_ORDERS] = str(self.orders / name)
            peer.prefix = self.inside(peer)
        return peer

    def address_of(self, name: str) -> str:
        return f"tcp://10.77.0.{10 + int(self.host[name][1:])}:{PORT}"

    def forget_memory(self, peer: Peer) -> str:
        """As a machine does that lost power: what a killed agent left in shared memory is gone; how much, in words."""
        folders = list(Path("/dev/shm").glob(f"dmc-{peer.peer_id[:16]}-*"))
        for folder in folders:
            shutil.rmtree(folder)
        return f"{len(folders)} folders of shared memory removed"

    # -- the cable -------------------------------------------------------------------------------------------

    def cut(self, peer: Peer, way: str) -> None:
        """``way``: "" both ways, "in" it hears nothing, "out" nobody hears it."""
        self._netlab("cut", self.host[peer.name], *(["--one-way", way] if way else []))

    def cable(self, peer: Peer) -> str:
        """Its state, as `netlab list` has it."""
        hosts = json.loads(self._netlab("list", "--json"))["hosts"]
        return next(str(h["state"]) for h in hosts if h["host"] == self.host[peer.name])

    def mend(self, peer: Peer) -> None:
        self._netlab("heal", self.host[peer.name])

    def lose(self, peer: Peer, percent: int) -> None:
        """Drop so many of 100 packets at random, of those that come and of those that go."""
        self._repeated[peer.name] = self._repeats(peer)
        drop = f"numgen random mod 100 < {percent} counter drop"
        rules = "".join(
            f"chain {hook} {{ type filter hook {hook} priority 0; {way} eth0 {drop}; }}\n"
            for hook, way in (("input", "iif"), ("output", "oif"))
        )
        self._nft(peer, "-f", "-", text=f"table inet {LOSS_TABLE} {{\n{rules}}}\n")

    def silence(self, deaf: Peer, mute: Peer, *, only_calls: bool = False) -> str:
        """Drop what comes to one peer from another one; by what name that is undone.

        ``only_calls``: its new connections alone, as a firewall does; it answers to those that the deaf one makes.
        """
        self._silences += 1
        table = f"silence{self._silences}"
        address = self.address_of(mute.name).removeprefix("tcp://").rpartition(":")[0]
        calls = "tcp flags & (syn | ack) == syn" if only_calls else ""
        rule = f"type filter hook input priority 0; ip saddr {address} {calls} counter drop;"
        self._nft(deaf, "-f", "-", text=f"table inet {table} {{\nchain input {{ {rule} }}\n}}\n")
        return table

    def silenced(self, deaf: Peer, table: str) -> int:
        """Packets dropped so far."""
        return self._dropped(deaf, table)

    def silence_no_more(self, deaf: Peer, table: str) -> int:
        """Undo `silence`; packets that it dropped."""
        dropped = self.silenced(deaf, table)
        self._nft(deaf, "delete", "table", "inet", table)
        return dropped

    def lost(self, peer: Peer) -> int:
        """Packets dropped so far."""
        return self._dropped(peer, LOSS_TABLE)

    def _dropped(self, peer: Peer, table: str) -> int:
        said = json.loads(self._nft(peer, "-j", "list", "table", "inet", table))
        rules = [item["rule"] for item in said["nftables"] if "rule" in item]
        counters = [part["counter"] for rule in rules for part in rule["expr"] if "counter" in part]
        return sum(int(counter["packets"]) for counter in counters)

    def lose_nothing(self, peer: Peer) -> tuple[int, int]:
        """Undo `lose`; packets that it dropped, and TCP segments that the host has sent again since then."""
        dropped = self.lost(peer)
        self._nft(peer, "delete", "table", "inet", LOSS_TABLE)
        return dropped, self._repeats(peer) - self._repeated[peer.name]

    def _repeats(self, peer: Peer) -> int:
        command = [*self.inside(peer), "cat", "/proc/net/snmp"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        names, values = (line.split() for line in said if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])

    def _nft(self, peer: Peer, *words: str, text: str = "") -> str:
        command = [*self.inside(peer), "nft", *words]
        return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout

    # -- what is left ----------------------------------------------------------------------------------------

    def open_sockets(self) -> list[str]:
        """TCP sockets on the hosts, but for those that the kernel alone remembers for a while."""
        found = []
        for peer in self.peers:
            done = subprocess.run(
                [*self.inside(peer), "ss", "-tanH"], check=True, capture_output=True, text=True
            )
            found += [f"{peer.name}: {line}" for line in done.stdout.splitlines() if _belongs(line)]
        return found

    def left_files(self) -> list[str]:
        """In shared memory and among temporary files: what peers that are gone should have removed."""
        ids = {peer.peer_id[:16] for peer in self.peers if peer.events("started")}
        shared = [p for p in Path("/dev/shm").glob("dmc-*") if any(one in p.name for one in ids)]
        return [str(path) for path in [*shared, *self.temporary.glob("dmc*")]]


def _belongs(line: str) -> bool:
    """Whether some process has it, or should have closed it: not a connection in its last, orphaned states."""
    return line.split()[0] in ("LISTEN", "ESTAB", "CLOSE-WAIT", "SYN-SENT")
