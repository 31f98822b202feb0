"""A mistake at the command line costs one line that names the value and the remedy, and the right exit code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.cluster import DMC_PEER, Cluster, Line, write_samples

DEADLINE_S = 60
HOME_BYTES = 1 << 20
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands of a test run: a data set `tiny`, a script `train.py`."""
    write_samples(tmp_path / "tiny", 40)
    (tmp_path / "train.py").write_text(
        "import p2p_dmc as dmc\nwith dmc.connect() as peer:\n    peer.dataset('tiny')\n"
    )
    return tmp_path


def dmc_peer(folder: Path, *arguments: str) -> Done:
    """The real command, with `home` as its home unless another is given."""
    command = [str(DMC_PEER), *arguments]
    if "--home" not in arguments and "--help" not in arguments:
        command[2:2] = ["--home", "home"]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def one_line(done: Done) -> str:
    """The only line on standard error that is an error, which is the last; the command failed with 1."""
    lines = done.stderr.splitlines()
    assert done.returncode == 1, done.stderr
    errors = [line for line in lines if line.startswith("dmc-peer: ")]
    assert len(errors) == 1 and lines[-1] == errors[0], done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return errors[0]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def free_port() -> int:
    """Of nobody who listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- what is wrong with the arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            f"seed-dataset nowhere --name {'n' * 129}",
            r"data set name 'n+': give --name with 1 to 128 printable",
        ),
        (
            f"seed-dataset tiny --val-fraction .5 --name {'n' * 125}",
            r"'n+': give --name with 1 to 124 printable",
        ),
        ("seed-dataset tiny --name \x07 --dry-run", r"data set name '\\x07': give --name"),
        (
            "seed-dataset circle",
            r"'circle': Too many levels of symbolic links; give an existing folder or file",
        ),
        ("seed-dataset /", r"data set name '': give --name"),
        (
            "seed-dataset tiny --val-fraction 1e-9",
            r"1e-09: none of 40 samples would be held out, going by their keys",
        ),
        ("seed-dataset nowhere", r"'nowhere': No such file or directory; give an existing folder"),
        ("seed-dataset empty", r"'empty': no samples found .*; check the path and --include"),
        ("seed-dataset tiny --include *.jpg", r"'tiny': no samples found .* 40 not matching --include"),
        ("seed-dataset many", r"sample 'a': more than 16 files share this stem; .*--stem"),
        ("seed-dataset tiny --capacity 5KiB", r"no room for \d+ bytes, 5120 are free; .*--capacity"),
        ("seed-dataset tiny --home train.py/home", r"train\.py/home: Not a directory; .*--home DIR"),
        ("seed-dataset tiny --listen tcp://0.0.0.0:0", r"tcp://0\.0\.0\.0:0 can be reached .*add --insecure"),
        (
            "seed-dataset tiny --listen tcp://no.such.invalid:0",
            r"'no\.such\.invalid' is no address of this machine",
        ),
        (
            "seed-dataset tiny --listen tcp://127.0.0.1:{taken}",
            r"port {taken} on 127\.0\.0\.1 is in use; .*--listen",
        ),
        ("join tcp://127.0.0.1:{free} trian.py", r"'trian\.py' is no file; give the path of a Python script"),
        ("join nonsense", r"'nonsense' is no file and no address \(tcp://HOST:PORT\)"),
        ("join", r"nothing to join: give the address of a peer"),
        ("join tcp://10.77.0.11:7400 train.py", r"on another machine.*loopback only.*add --insecure"),
        (
            "join --listen tcp://127.0.0.1:{taken} tcp://127.0.0.1:{free}",
            r"port {taken} on 127\.0\.0\.1 is in use",
        ),
        (
            "join --listen tcp://127.0.0.1:{taken} tcp://127.0.0.1:{free} train.py",
            r"port {taken} on .* is in use",
        ),
        (
            "join --home train.py/home tcp://127.0.0.1:{free} train.py",
            r"train\.py/home: .*; give another place with --home DIR",
        ),
        ("join --run a/b tcp://127.0.0.1:{free} train.py", r"'a/b' \(--run\) is no name of a run: letters"),
        ("status", r"no agent of home runs; give the address of a peer, or its --home"),
        ("placement", r"no agent of home runs"),
        ("leave", r"no agent of home runs"),
        ("stop", r"no agent of home runs"),
        ("status tcp://127.0.0.1:{free}", r"no peer answers at tcp://127\.0\.0\.1:{free}; check the address"),
        ("stop 127.0.0.1:{free}", r"no peer answers at 127\.0\.0\.1:{free}"),
        ("leave tcp://127.0.0.1:{free}", r"no peer answers at tcp://127\.0\.0\.1:{free}"),
    ],
)
def test_a_mistake_is_one_line(folder: Path, command: str, says: str) -> None:
    (folder / "empty").mkdir()
    (folder / "many").mkdir()
    (folder / "circle").symlink_to("circle")
    for number in range(17):
        (folder / "many" / f"a.{number}").write_text("x")
    with taken_port() as taken:
        numbers = {"taken": str(taken), "free": str(free_port())}

        def filled(text: str) -> str:
            for name, number in numbers.items():
                text = text.replace(f"{{{name}}}", number)
            return text

        line = one_line(dmc_peer(folder, *filled(command).split()))
    assert re.search(filled(says), line), line


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("seed-dataset", "Missing argument 'PATH'"),
        ("seed-dataset tiny --capacity lots", "'lots' is not a size; write 64MiB, 100GiB"),
        ("seed-dataset tiny --max-upload fast", "'fast' is not a rate; write 20MB/s or 100Mbit/s"),
        ("join --max-download 1kB/s tcp://127.0.0.1:7400", "'1kB/s' is too slow to fetch anything; at least 1MB/s"),
        ("seed-dataset tiny --max-shard-size huge", "'huge' is not a size; write 64MiB, 100GiB or"),
        ("seed-dataset tiny --listen 7400", "'7400' is not an address; write tcp://HOST:PORT"),
        ("seed-dataset tiny --join tcp://127.0.0.1:7400,here", "'here' is not an address"),
        ("seed-dataset tiny --replicas 0", "0 is not in the range"),
        ("seed-dataset tiny --val-fraction 0", "'0' is not between 0 and 1; write for example 0.1"),
        ("seed-dataset tiny --val-fraction nan", "'nan' is not between 0 and 1"),
        ("seed-dataset tiny --val-fraction 1", "'1' is not between 0 and 1"),
        ("seed-dataset tiny --val-fraction half", "'half' is not between 0 and 1"),
        ("seed-dataset tiny --domain rack:1", "'rack:1' is not a name like rack1"),
        ("join --checkpoint-every soon tcp://127.0.0.1:1 train.py", "'soon' is not a time; write 30s, 5m or 1h"),
        ("join tcp://127.0.0.1:1 --name x train.py", "'--name' is no option of join; join's options come before SEED"),
        ("status http://x", "'http://x' is not an address"),
        ("stop tcp://127.0.0.1:70000", "'tcp://127.0.0.1:70000' is not an address"),
        ("nonsense", "No such command 'nonsense'"),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(folder: Path, command: str, says: str) -> None:
    done = dmc_peer(folder, *command.split(), *(["--help"] if command == "nonsense" else []))
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


# -- help ---------------------------------------------------------------------------------------------------------

OPTIONS = {
    "seed-dataset": "name mode depth max-shard-size replicas include domain listen join home json "
    "leave-when-replicated max-upload max-download",
    "join": "run listen advertise home capacity domain min-peers backend quorum name insecure checkpoint-every json "
    "max-upload max-download",
    "status": "home json",
    "placement": "home json without",
    "leave": "home json",
    "stop": "home json run",
    "checkpoint": "home json run",
    "demo": "keep json",
}


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option(folder: Path, command: str) -> None:
    done = dmc_peer(folder, command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for option in OPTIONS[command].split():
        found = re.search(rf"--{option}\b[^\n]*(\n {{10,}}[^\n]+)*", done.stdout)
        assert found and len(found[0].split()) > 4, f"--{option} is not explained:\n{done.stdout}"


def cpu_s(command: list[str]) -> float:
    """Processor seconds of the quickest of five."""
    code = (
        "import json, resource, subprocess, sys\n"
        "subprocess.run(json.loads(sys.argv[1]), stdout=subprocess.DEVNULL, check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    measure = [sys.executable, "-c", code, json.dumps(command)]
    return min(float(subprocess.run(measure, capture_output=True, check=True).stdout) for _ in range(5))


def test_help_takes_a_moment() -> None:
    """Processor time, which a busy machine does not stretch: beyond what python itself needs to start."""
    bare_s = cpu_s([sys.executable, "-c", "pass"])
    assert cpu_s([str(DMC_PEER), "--help"]) - bare_s < 0.25


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, p2p_dmc.cli; print([m for m in ('torch', 'numpy', 'zmq', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- data sets and homes ------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """A home of a megabyte: a file system of that size where this user may mount one, else --capacity."""
    home = tmp_path / "full"
    home.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={HOME_BYTES}", "tmpfs", str(home)], check=False
        ).returncode
        == 0
    )
    try:
        yield home, [] if mounted else ["--capacity", str(HOME_BYTES)]
    finally:
        if mounted:
            subprocess.run(["umount", str(home)], check=True)


def test_a_full_disk(folder: Path, small_disk: tuple[Path, list[str]]) -> None:
    home, options = small_disk
    (folder / "big").mkdir()
    (folder / "big" / "one.bin").write_bytes(bytes(2 * HOME_BYTES))
    line = one_line(dmc_peer(folder, "seed-dataset", "big", "--home", str(home), *options))
    assert re.search(r"full/store.*no room for \d+ bytes, \d+ are free; free some disk space", line), line


def test_a_disk_that_fills_before_the_agent_can_start(
    folder: Path, small_disk: tuple[Path, list[str]]
) -> None:
    home, options = small_disk
    if options:
        home.chmod(0o500)  # an ordinary user: what cannot be written at all comes to the same
    else:
        (home / "ballast").write_bytes(bytes(HOME_BYTES - 4096))
        with contextlib.suppress(OSError), (home / "rest").open("wb") as rest:
            while True:
                rest.write(bytes(1024))
                rest.flush()
    line = one_line(
        dmc_peer(folder, "join", "--home", str(home), f"tcp://127.0.0.1:{free_port()}", "train.py")
    )
    assert re.search(r"full.*(No space left on device|Permission denied)", line), line


def test_another_data_set_of_the_same_name_in_one_home(cluster: Cluster, folder: Path) -> None:
    seed = cluster.seed(folder / "tiny")
    seed.interrupt()
    cluster.ended([seed])
    other = write_samples(folder / "other" / "tiny", 41)
    line = one_line(dmc_peer(folder, "seed-dataset", str(other), "--home", str(seed.home)))
    digest = next((seed.home / "store").iterdir()).name
    assert re.search(
        rf"'tiny' is data set {digest} of this home, with 40 samples in .*, not 41 in .*--name", line
    )
    changed = write_samples(folder / "changed" / "tiny", 40, seed=1)  # the same shape: told when it is cut
    line = one_line(
        dmc_peer(folder, "seed-dataset", str(changed), "--max-shard-size", "16KiB", "--home", str(seed.home))
    )
    assert re.search(
        rf"'tiny': another data set has this name, {digest} is here and \w+ is new; use another --name", line
    )
    assert [path.name for path in (seed.home / "store").iterdir()] == [digest]


def test_a_home_has_one_agent(cluster: Cluster, folder: Path) -> None:
    seed = cluster.seed(folder / "tiny")
    for command in ("seed-dataset tiny", f"join tcp://127.0.0.1:{free_port()}"):
        name, *rest = command.split()
        line = one_line(dmc_peer(folder, name, "--home", str(seed.home), *rest))
        assert seed.address in line and "another --home" in line


def test_a_data_set_that_nobody_has_is_waited_for_with_the_remedy(cluster: Cluster, folder: Path) -> None:
    seed = cluster.seed(folder / "tiny")
    script = folder / "misspelt.py"
    script.write_text((folder / "train.py").read_text().replace("'tiny'", "{'tiny': 1, 'tyni': 2}"))
    peer = cluster.join("a", seed, script=script)
    said = (
        "waiting for data set 'tyni', which no peer has that is in contact; known so far: tiny (seed it, or Ctrl-C and "
        "correct the name)\n"
    )
    cluster.wait(lambda: said in peer.said(), "it says what it waits for")


def test_seeding_the_same_files_again_is_the_same_data_set(cluster: Cluster, folder: Path) -> None:
    first, again = (seeded(cluster, folder) for _ in range(2))
    assert first["samples"] == 40 and first["fields"] == ["bin"] and first["dataset"] == again["dataset"]
    assert first["join"].startswith("dmc-peer join tcp://")


def seeded(cluster: Cluster, folder: Path) -> Line:
    """Seed, read what that says, leave; the facts."""
    seed = cluster.seed(folder / "tiny", "--json")
    cluster.wait(lambda: "on each machine that trains, run" in seed.said(), "it says what it seeds")
    text = r"tiny: folder of files, 40 samples with fields bin, 640 B\n.* in \d+ shards?, 2 replicas wanted\n"
    assert re.search(text, seed.said())
    seed.interrupt()
    cluster.ended([seed])
    facts: Line = json.loads(seed.log("out").read_text().splitlines()[0])
    return facts


def test_a_name_that_others_use_for_another_data_set(cluster: Cluster, folder: Path) -> None:
    """The newcomer is told, and the peer that has the name goes on; under another name it can join from that home."""
    seed = cluster.seed(folder / "tiny")
    other = write_samples(folder / "other" / "tiny", 41)
    arguments = ["seed-dataset", str(other), "--listen", "tcp://127.0.0.1:0", "--join", seed.address]
    line = one_line(dmc_peer(folder, *arguments))
    digest = next((seed.home / "store").iterdir()).name
    assert re.search(
        rf"'tiny' is data set {digest} of the peers at .*, and \w{{32}} here; .* another --name", line
    ), line
    assert list((folder / "home" / "store").iterdir()) == []
    renamed = cluster.peer("renamed")
    renamed.start([*arguments, "--name", "other", "--home", str(folder / "home")])
    cluster.wait(lambda: seed.events("dataset", name="other"), "the other peer knows it")
    assert seed.running and not seed.events("name_clash")


def test_a_name_taken_by_a_seed_that_comes_later(cluster: Cluster, folder: Path) -> None:
    """Nobody could be asked before: membership tells, and again only the newcomer ends."""
    address = f"tcp://127.0.0.1:{free_port()}"
    other = write_samples(folder / "other" / "tiny", 41)
    late = cluster.peer("late")
    home = ["--home", str(late.home), "--listen", "tcp://127.0.0.1:0"]
    late.start(["seed-dataset", str(other), "--join", address, *home])
    cluster.wait(
        lambda: f"no peer answers at {address} yet; trying again" in late.said(), "it says that it waits"
    )
    seed = cluster.seed(folder / "tiny", address=address)
    cluster.ended([late], code=1)
    digests = [path.name[:12] for path in (seed.home / "store").iterdir()]
    assert re.search(
        rf"^dmc-peer: two data sets are named 'tiny': \w+ here and {digests[0]} ", late.said(), re.M
    )
    assert list((late.home / "store").iterdir()) == []
    assert seed.running
