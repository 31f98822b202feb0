"""The two streams of a command, and a reader that is slow or gone."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from p2p_dmc.data.formats import scan
from p2p_dmc.observe.console import Console
from p2p_dmc.observe.output import Output, write_all
from p2p_dmc.wire.messages import LocalLine

ROUND = {
    "time": 1.0, "run": "r", "view_epoch": 1, "round": 1, "members": 1, "tau": 1, "loss": 0.5, "epoch": 0,
    "samples_round": 8, "bytes_sent": 0,
}  # fmt: skip


def line(kind: str, **facts: object) -> LocalLine:
    return LocalLine(kind=kind, data=json.dumps(facts).encode())


def test_words_on_standard_error_the_scripts_output_untouched(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    with Console(as_json=False) as console:
        console.say("hello\x07")
        console.fact("seeding", name="x")
        console.local(LocalLine(kind="output", data=b"caf\xe9\n"))
        console.local(LocalLine(kind="say", data=b"waits \xff"))
        console.local(line("event", event="view", view_epoch=1, members=["a" * 32]))
        console.local(object())
    out, err = capfdbinary.readouterr()
    assert out == b"caf\xe9\n"
    assert err == b"hello\\x07\nwaits \\xff\nview 1: 1 peer, aaaaaaaa\n"


def test_json_lines_only_on_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with Console(as_json=True) as console:
        console.fact("seeding", name="é")
        console.local(LocalLine(kind="output", data=b"\xff\n"))
        console.local(line("round", **ROUND))
    out, err = capfdbinary.readouterr()
    assert [json.loads(one) for one in out.splitlines()] == [{"event": "seeding", "name": "é"}, ROUND]
    assert err.startswith(b"\xff\nview 1 round 1  ")


def test_the_first_and_the_last_round_are_shown(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with Console(as_json=False) as console:
        for number in range(1, 6):
            console.local(line("round", **ROUND | {"round": number, "time": float(number)}))
    _, err = capfdbinary.readouterr()
    assert [text.split()[3] for text in err.splitlines()] == [b"1", b"5"]


def test_a_look_at_the_input_in_words(tmp_path: Path) -> None:
    for name in ("a.txt", "a.json", "b.txt", ".hidden"):
        (tmp_path / name).write_text("1234")
    with Console(as_json=False) as console:
        said = console.scan_line(Path("data"), scan(tmp_path))
    assert said == "data: folder of files, 2 samples with fields json, txt, 12 B; passed over: 1 hidden"


def test_a_reader_that_is_gone_is_told_of_once() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    output, told = Output(), threading.Event()
    output.on_broken = told.set
    try:
        output.put(writing, b"x")
        assert told.wait(10) and output.broken
        output.on_broken = lambda: pytest.fail("told twice")
        output.put(writing, b"y")
    finally:
        stdout = os.dup(1)
        output.close()
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(writing)


def test_a_slow_reader_costs_lines_not_time() -> None:
    """The writer is stuck in a full pipe; what does not fit in the queue is lost, counted and said."""
    reading, writing = os.pipe()
    output = Output(most_waiting=3)
    filling = b"x" * (1 << 20)  # more than a pipe holds
    output.put(writing, filling)
    while output.waiting:
        pass  # until the thread has it in hand
    for number in range(10):
        output.put(writing, b"%d\n" % number)
    assert output.lost == 7
    got = b""
    while not got.endswith(b"2\n"):
        got += os.read(reading, 1 << 16)
    assert got == filling + b"0\n1\n2\n"
    output.close()
    os.close(reading)
    os.close(writing)


def test_write_all_goes_on_after_a_partial_write() -> None:
    reading, writing = os.pipe()
    data = bytes(range(256)) * 4096
    thread = threading.Thread(target=write_all, args=(writing, data))
    thread.start()
    got = b""
    while len(got) < len(data):
        got += os.read(reading, 1000)
    thread.join(10)
    assert got == data
    os.close(reading)
    os.close(writing)
