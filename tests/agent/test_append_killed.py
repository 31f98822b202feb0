"""seed-dataset --append, struck at each step that it takes on the disk: the next one ends as if nothing had been.

The steps are the system calls that make, sync, rename, link and remove files. One process is struck before its first
step, another before its second, and so on until one is through before its turn comes.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import seed_command
from p2p_dmc.agent.home import Home
from p2p_dmc.data.store import Store
from p2p_dmc.observe.console import Console
from tests.agent.test_seed_command import OPTIONS
from tests.data.helpers import make_tree, read_back, small_tree

NAMES = ("tree", "tree-val")
CHILD = """
import os, shutil, signal, sys
from pathlib import Path
from tests.agent.test_append_killed import append, found_in

folder, struck_by, every = Path(sys.argv[1]), getattr(signal, sys.argv[2]), int(sys.argv[3])


def in_a_child(home, strike_at=0):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        for name in ("fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir") if strike_at else ():
            setattr(os, name, stricken(getattr(os, name), strike_at))
        append(home, folder / "tree")
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


steps = 0


def stricken(real, strike_at):
    def call(*words, **named):
        global steps
        steps += 1
        if steps == strike_at:
            os.kill(os.getpid(), struck_by)
        return real(*words, **named)

    return call


code = None
for number in range(1, 500, every):
    home = folder / f"home-{number}"
    shutil.copytree(folder / "home", home)
    code = in_a_child(home, number)
    left = found_in(home)
    ended = in_a_child(home)
    print([code, left, ended, found_in(home), [one.name for one in (home / "store").glob("*-*")]])
    if code == 0:
        break
"""


def append(home: Path, tree: Path, *, first: bool = False) -> None:
    """The command up to where its agent would start."""
    options: dict[str, Any] = {**OPTIONS, "val_fraction": 0.3, "append": not first}
    with Console(as_json=False) as console:
        seed_command._shard(Home(home), tree, options, console)


def found_in(home: Path) -> dict[str, int]:
    """As the next process finds it: of each version whose shards are all here and whole, how many it has."""
    store = Store(home / "store", keep_staging=True)
    whole = {}
    for digest in store.datasets():
        shards = range(len(store.manifest(digest).shards))
        if all(store.verify(digest, shard) for shard in shards):
            whole[digest.hex()] = len(shards)
    return whole


@pytest.mark.parametrize(
    ("struck_by", "code", "every"), [("SIGKILL", -signal.SIGKILL, 1), ("SIGINT", 130, 5)]
)
def test_wherever_it_is_struck_the_next_one_ends_the_same(
    tmp_path: Path, struck_by: str, code: int, every: int
) -> None:
    home, tree = Home(tmp_path / "home"), small_tree(tmp_path / "tree", folders=2)
    home.create()
    append(home.root, tree, first=True)
    before = found_in(home.root)
    assert len(before) == 2 and sum(before.values()) > 2
    make_tree(tree, {f"zoo/{i}.txt": 3000 for i in range(10)})
    words = [sys.executable, "-c", CHILD, str(tmp_path), struck_by, str(every)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    *struck, through = [json.loads(line.replace("'", '"')) for line in done.stdout.splitlines()]
    assert through[0] == 0 and len(through[1]) == 4, done.stderr
    assert len(struck) > 20 // every and {one[0] for one in struck} == {code}, "not each was struck"
    for _, left, ended, found, leftovers in struck:
        assert before.items() <= left.items() <= through[1].items(), "a version was broken"
        assert (ended, found, leftovers) == (0, through[1], []), done.stderr
    assert {len(one[1]) for one in struck} == {2, 3, 4}, "no version came before it was through"
    last = Store(tmp_path / "home-1" / "store")
    sides = [set(read_back(last, manifest)) for name in NAMES if (manifest := last.by_name(name))]
    assert [len(side) for side in sides] == [34 - len(sides[1]), len(sides[0] ^ sides[1]) - len(sides[0])]
