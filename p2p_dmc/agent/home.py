"""A peer's home directory: identity, boot, lock, and how local commands find the agent (DESIGN.md section 11)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zmq

from p2p_dmc.config import DOMAIN
from p2p_dmc.errors import UserError

SOCKETS_PREFIX = "dmc-"
RECORD_PREFIX = "current-"
"""Of the files that name the newest state in an agent's memory (memory_record.py)."""


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace ``path`` atomically and durably: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a home is. ``peer_id`` is the hash of the CURVE public key, so that keys change no identity."""

    peer_id: str
    public_key: str
    secret_key: str
    boot: int


class Home:
    """One agent per home directory, guarded by a lock that dies with its holder."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self._lock: IO[str] | None = None
        self.sockets_folder: Path | None = None

    @property
    def store_root(self) -> Path:
        return self.root / "store"

    def run_folder(self, run: str) -> Path:
        return self.root / "runs" / run

    def create(self) -> None:
        """Make the directory; UserError when that cannot be."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.store_root.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.root}: {error.strerror}; give another place with --home DIR") from None

    def lock(self) -> None:
        """Be the only agent of this home until the process ends; UserError if another one is."""
        self.create()
        self._lock = open(self.root / "agent.lock", "a")  # noqa: SIM115 - held for the life of the process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise UserError(f"{self.root} already has a running agent; use another --home") from None
        self._remove_stale_socket()

    def _remove_stale_socket(self) -> None:
        """An agent that was killed left its socket behind, and its word of where that is."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = str(json.loads((self.root / "agent.json").read_text())["endpoint"])
            socket = Path(said.removeprefix("ipc://"))
            if socket.is_socket() and socket.parent.name.startswith(SOCKETS_PREFIX):
                socket.unlink()
                socket.parent.rmdir()

    def unlock(self) -> None:
        """Give the home back and remove what pointed at this agent."""
        with contextlib.suppress(FileNotFoundError):
            (self.root / "agent.json").unlink()
        if self.sockets_folder is not None:
            shutil.rmtree(self.sockets_folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def start_identity(self) -> Identity:
        """Load or make the key pair and take the next boot number, on disk before it is used."""
        path = self.root / "identity.json"
        if path.exists():
            try:
                data = json.loads(path.read_text())
                public, secret, boot = str(data["public_key"]), str(data["secret_key"]), int(data["boot"])
            except (ValueError, KeyError, TypeError, OSError):
                raise UserError(f"{path} cannot be read; restore it, or use another --home") from None
        else:
            public_bytes, secret_bytes = zmq.curve_keypair()
            public, secret, boot = public_bytes.decode(), secret_bytes.decode(), 0
        boot += 1
        write_json(path, {"public_key": public, "secret_key": secret, "boot": boot}, mode=0o600)
        peer_id = hashlib.blake2b(public.encode(), digest_size=16).hexdigest()
        return Identity(peer_id=peer_id, public_key=public, secret_key=secret, boot=boot)

    def local_endpoint(self) -> str:
        """A short ipc:// endpoint for this agent's trainers and local commands (a socket path may have 107 bytes)."""
        self.sockets_folder = Path(tempfile.mkdtemp(prefix=SOCKETS_PREFIX))
        return f"ipc://{self.sockets_folder}/agent"

    def announce(self, **facts: Any) -> None:
        """Tell local commands where the running agent is."""
        write_json(self.root / "agent.json", {"pid": os.getpid(), **facts}, mode=0o600)

    def running_agent(self) -> dict[str, Any] | None:
        """What a running agent of this home announced, or None."""
        try:
            data: dict[str, Any] = json.loads((self.root / "agent.json").read_text())
            with open(self.root / "agent.lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return data
        except (ValueError, OSError):
            return None
        return None  # the lock was free: whoever wrote agent.json is gone

    def remember_peers(self, peers: dict[str, str]) -> None:
        """Addresses that a later start tries, each with the peer_id that lived there."""
        write_json(self.root / "peers.json", peers)

    def domain(self, given: str | None) -> str:
        """The failure domain: what is given now, which is remembered, or what was last; "" for none.

        A disk that takes nothing, or gives back what is no name, costs the memory.
        """
        path = self.root / "domain.json"
        if given is not None:
            with contextlib.suppress(OSError):
                write_json(path, given)
            return given
        with contextlib.suppress(OSError, ValueError):
            remembered = json.loads(path.read_text())
            if isinstance(remembered, str) and DOMAIN.fullmatch(remembered):
                return remembered
        return ""

    def known_peers(self) -> dict[str, str]:
        """Address to peer_id of the peers that this home last knew."""
        try:
            data = json.loads((self.root / "peers.json").read_text())
            return {str(address): str(peer_id) for address, peer_id in data.items()}
        except (OSError, ValueError, AttributeError):
            return {}


class MemoryFolder:
    """A folder for the state that the agent owns: /dev/shm when it has room, else the home (DESIGN.md section 2)."""

    def __init__(self, home: Home, peer_id: str) -> None:
        self._home = home
        self._prefix = f"dmc-{peer_id[:16]}-"
        self._folder: Path | None = None
        self.left: list[Path] = []
        """What killed agents of this peer left, as far as a record says what is in it."""

    def folder(self, needed_bytes: int) -> Path:
        """The folder; chosen at the first call by the room that is needed. Useless leftovers are removed."""
        if self._folder is None:
            shared = Path("/dev/shm")
            bases = [self._home.root / "memory"]
            with contextlib.suppress(OSError):
                for base in (shared, bases[0]):
                    for stale in base.glob(f"{self._prefix}*"):  # this home's lock is ours: its agent is gone
                        if any(stale.glob(f"{RECORD_PREFIX}*")):
                            self.left.append(stale)
                        else:
                            shutil.rmtree(stale, ignore_errors=True)
                if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * needed_bytes:
                    bases.insert(0, shared)
            bases[0].mkdir(exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=bases[0]))
        return self._folder

    def remove(self) -> None:
        for folder in self.left:
            shutil.rmtree(folder, ignore_errors=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
