"""What a person types at peers that run, and what they see, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.system.cluster import ANY_PORT, DMC_PEER, MARK, SCRIPT, Cluster, Peer
from tests.system.commands import DEADLINE_S, command, facts
from tests.system.scenario import START_S, arguments, start

PRINTING = """
import os, sys
os.write(1, b"caf\\xe9 \\xff\\xfe\\n")
print("x" * 100_000, flush=True)
sys.argv[0] = {script!r}
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


def popen(cluster: Cluster, *words: str) -> subprocess.Popen[bytes]:
    """A command whose output is a pipe that the test may read, or not."""
    environment = {**os.environ, MARK: cluster.mark, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [str(DMC_PEER), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def maps_torch(process: psutil.Process) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


# -- status, placement, leave, stop -------------------------------------------------------------------------------


def test_questions_to_two_trainers_and_their_end(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny", "--peer-name", "seed")
    alice, bob = start(cluster, seed, ("alice", "bob"))
    for peer in (alice, bob):
        trainer = peer.trainer()
        assert trainer is not None and maps_torch(trainer) and not maps_torch(peer.tree()[0])
    assert not maps_torch(seed.tree()[0])

    see_status(cluster, seed, alice, bob)
    see_placement(cluster, seed, bob)

    left = facts(cluster, "leave", "bob", "--home", str(alice.home))
    assert left == {"peer_id": bob.peer_id, "name": "bob", "state": "LEFT"}
    cluster.ended([bob])
    assert re.search(r"^leaving|^run 'train' left; the same command goes on from there$", bob.said(), re.M)
    cluster.wait(
        lambda: "bob (" in alice.said() and " has left\n" in alice.said(), "alice reads that bob has left"
    )

    stopped = facts(cluster, "stop", seed.address)  # which does not train: it says whom to ask
    cluster.ended([alice])
    assert "run 'train' stopped; the same command goes on from there\n" in alice.said()
    assert (stopped["run"], stopped["outcome"], stopped["stop_not_heard"]) == ("train", "stopped", [])
    last = alice.rounds()[-1]
    assert (stopped["view_epoch"], stopped["round"]) == (last["view_epoch"], last["round"])

    resumes_and_is_interrupted(cluster, alice, last["round"])
    assert command(cluster, "leave", "--home", str(seed.home)) == f"seed ({seed.peer_id[:8]}) has left\n"
    cluster.ended([seed])


def see_status(cluster: Cluster, seed: Peer, alice: Peer, bob: Peer) -> None:
    """The same from a peer that trains and from the one that does not."""
    told = [facts(cluster, "status", seed.address), facts(cluster, "status", "--home", str(alice.home))]
    for one in told:
        assert {(m["name"], m["role"], m["state"]) for m in one["members"]} == {
            ("seed", "store", "ALIVE"),
            ("alice", "train", "ALIVE"),
            ("bob", "train", "ALIVE"),
        }
        [run], [dataset] = one["runs"], one["datasets"]
        assert set(run["members"]) == {alice.peer_id, bob.peer_id}
        assert run["round"] >= 2 and run["tau"] == 4 and run["loss"] > 0 and run["epochs"] == 20
        assert run["lineage"] == [run["view_epoch"], run["round"]]
        assert (dataset["name"], dataset["samples"], dataset["lost"]) == ("tiny", 320, 0)
        assert set(dataset["holders"]) == {seed.peer_id, alice.peer_id, bob.peer_id}
        assert dataset["progress"][0]["total"] == 320
    text = command(cluster, "status", seed.address)
    assert re.search(r"^PEER +ID +STATE +ROLE +ADDRESS$", text, re.M)
    assert re.search(rf"^alice +{alice.peer_id[:8]} +alive +train +{alice.address}$", text, re.M)
    assert re.search(
        r"^train +\d+ +\d+ +4 +\d\.\d{4} +\d+ of 20 +\d+% +\d+ +\d+\.\d+ +(alice, bob|bob, alice)$",
        text,
        re.M,
    )
    assert re.search(
        r"^data set tiny \w{12}: 320 samples in \d+ shards, .* under-replicated \d+, lost 0$", text, re.M
    )


def see_placement(cluster: Cluster, seed: Peer, bob: Peer) -> None:
    [dataset] = facts(cluster, "placement", seed.address, "--without", "bob")["datasets"]
    assert all(len(s["should"]) == 2 and seed.peer_id in s["does"] for s in dataset["shards"])
    placed = sum(bob.peer_id in s["should"] for s in dataset["shards"])
    assert len(dataset["moves"]) == placed > 0 and bob.peer_id not in {m["to"] for m in dataset["moves"]}
    text = command(cluster, "placement", "--home", str(bob.home), "--without", bob.peer_id[:10])
    assert re.search(r"^SHARD +SAMPLES +SIZE +SHOULD HOLD +HOLD$", text, re.M)
    assert re.search(r"^without bob:$", text, re.M)
    assert re.search(r"^(seed|alice) +\d+ +[\d.]+ \w+$", text, re.M)


def resumes_and_is_interrupted(cluster: Cluster, alice: Peer, stopped_at: int) -> None:
    """The same command goes on from the agreed checkpoint; Ctrl-C leaves with exit code 0."""
    when = time.time()
    cluster.restart(alice)
    cluster.rounds([alice], 1, when, START_S)
    assert alice.rounds(when)[0]["round"] == stopped_at + 1
    alice.interrupt()
    cluster.ended([alice])
    assert "leaving (again: at once)\n" in alice.said() and "Traceback" not in alice.said()


# -- what a join shows --------------------------------------------------------------------------------------------


def test_a_join_in_json_and_one_on_a_home_whose_agent_runs(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """Standard output is JSON only, whatever bytes the script prints; words, and those bytes, are on standard error."""
    script = tmp_path / "train.py"
    script.write_text(PRINTING.format(script=str(SCRIPT)))
    seed = cluster.seed(data, "--name", "tiny", "--peer-name", "seed")
    more = arguments(cluster, epochs=3)
    json_peer = cluster.join("alice", seed, *more, options=["--min-peers", "2", "--json"], script=script)
    cluster.join("seed", seed, *more, options=["--min-peers", "2"], script=script)
    cluster.rounds([json_peer, seed], 1, deadline_s=START_S)
    cluster.hurry()
    cluster.ended([json_peer])
    cluster.wait(lambda: seed.code is not None, "the handed-over script ends")
    assert seed.code == 0 and seed.running

    lines = [json.loads(line) for line in json_peer.log("out").read_text().splitlines()]
    kinds = [line.get("event", "round") for line in lines]
    assert kinds[0] == "listening" and kinds[-1] == "ended" and {"view", "round", "run_over"} <= set(kinds)
    assert lines[-1]["line"] == str(json_peer.home / "runs/train/final/model.safetensors")
    printed = b"caf\xe9 \xff\xfe\n"
    assert printed in json_peer.log("err").read_bytes() and printed in seed.log("out").read_bytes()

    said = seed.said()
    assert f"the agent of this home, at {seed.address}, gets the script\n" in said
    assert "run 'train' starts once 2 trainers are ready\n" in said
    assert re.search(r"^view \d+: 2 peers, (alice, seed|seed, alice)$", said, re.M)
    assert re.search(r"^view \d+ round \d+  peers 2  epoch \d+  tau 4  loss \d\.\d+  -", said, re.M), (
        "no rate is known yet"
    )
    assert f"run 'train' is finished: {seed.home}/runs/train/final/model.safetensors\n" in said
    again = popen(cluster, "join", "--home", str(seed.home), str(script))
    _, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 0 and b"run 'train' is finished: " in err


def test_an_output_that_nobody_reads_does_not_stop_the_agent(
    cluster: Cluster, data: Path, tmp_path: Path
) -> None:
    """A paused terminal or pager fills the pipe: the peer trains on. When it is closed, the peer leaves."""
    script = tmp_path / "train.py"
    script.write_text(PRINTING.format(script=str(SCRIPT)))
    seed = cluster.seed(data, "--name", "tiny")
    peer = cluster.peer("alice")
    words = ["--home", str(peer.home), "--listen", ANY_PORT, seed.address, str(script), *arguments(cluster)]
    with popen(cluster, "join", *words) as process:
        assert process.stdout is not None and process.stderr is not None
        cluster.rounds([peer], 2, deadline_s=START_S)
        assert facts(cluster, "status", "--home", str(peer.home))["runs"][0]["round"] >= 1
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 1
        assert b"Traceback" not in process.stderr.read()
    cluster.wait(
        lambda: seed.events("member", peer_id=peer.peer_id, state="LEFT"), "the seed hears that it leaves"
    )


@pytest.mark.parametrize("words", [("status",), ("placement",), ("status", "--json")])
def test_an_answer_that_nobody_reads(cluster: Cluster, data: Path, words: tuple[str, ...]) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [str(DMC_PEER), *words, seed.address],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


# -- Ctrl-C -------------------------------------------------------------------------------------------------------


def test_ctrl_c_in_a_join_on_a_running_home_leaves_the_run_only(cluster: Cluster, data: Path) -> None:
    seed = cluster.seed(data, "--name", "tiny")
    cluster.join("seed", seed, *arguments(cluster))
    cluster.rounds([seed], 1, deadline_s=START_S)
    assert seed.submission is not None
    seed.submission.send_signal(signal.SIGINT)
    assert seed.submission.wait(DEADLINE_S) == 0
    said = seed.said()
    assert "leaving the run (again: at once)\nrun 'train' left; the same command goes on from there\n" in said
    assert "Traceback" not in said
    assert seed.running and seed.trainer() is None


def test_a_second_ctrl_c_leaves_at_once(cluster: Cluster, data: Path) -> None:
    """The first waits for others to take its copies; here the only other peer has no room for any."""
    seed = cluster.seed(data, "--name", "tiny")
    full = cluster.peer("full")
    full.start(["join", "--home", str(full.home), "--listen", ANY_PORT, "--capacity", "1", seed.address])
    cluster.wait(lambda: seed.events("member", state="ALIVE"), "the seed knows the other peer")
    seed.interrupt()
    cluster.wait(
        lambda: "waiting up to 10 s for others to copy shards" in seed.said(), "it leaves gracefully"
    )
    assert seed.code is None
    seed.interrupt()
    cluster.wait(lambda: seed.code is not None, "it leaves at once", deadline_s=2.0)
    assert seed.code == 130
    assert seed.said().endswith("leaving at once\n") and "Traceback" not in seed.said()
    assert not (seed.home / "agent.json").exists()


def test_ctrl_c_while_shards_are_written(cluster: Cluster, tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    with (big / "zeros.bin").open("wb") as file:
        file.truncate(2 << 30)
    peer = cluster.peer("seed")
    peer.start(["seed-dataset", str(big), "--home", str(peer.home), "--listen", ANY_PORT])
    cluster.wait(lambda: list(peer.home.glob("store/*/shards/next-*")), "a shard is being written")
    peer.interrupt()
    cluster.ended([peer], code=130)
    assert "Traceback" not in peer.said() and list((peer.home / "store").iterdir()) == []
