"""What an agent says in its terminal of the home that it finds."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from p2p_dmc.agent.terminal import say_unreadable
from p2p_dmc.data.store import Store
from p2p_dmc.observe.console import Console
from tests.data.helpers import seed_tree, small_tree


def test_a_data_set_of_an_older_version_is_named_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "store")
    manifest = seed_tree(small_tree(tmp_path / "tree"), store)
    old = tmp_path / "store" / ("ab" * 16)
    (old / "shards").mkdir(parents=True)
    (old / "manifest.msgpack").write_bytes(msgpack.packb({"version": 1, "name": "small", "indexes": b""}))
    again = Store(tmp_path / "store")
    assert again.datasets() == (manifest.digest,)
    with Console(as_json=False) as console:
        say_unreadable(again, console)
        say_unreadable(store, console)
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"{old}: a data set that this version of the program cannot read; delete the folder"
    )
