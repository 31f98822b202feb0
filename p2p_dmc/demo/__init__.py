"""The demo: four peers on this machine train on its Python library; one is killed and comes back.

A real run of `dmc-peer` commands over real sockets, which fails when an invariant fails.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from p2p_dmc.demo import plan as plans
from p2p_dmc.demo import screen as screens
from p2p_dmc.demo import summary as summaries
from p2p_dmc.demo.plan import Plan
from p2p_dmc.demo.processes import Processes
from p2p_dmc.demo.story import Story
from p2p_dmc.errors import UserError

LEAVE_GRACE_S = 5.0
"""After Ctrl-C or a failure the peers may take this long to leave by themselves."""
INTERRUPTED = 130


def main(keep: Path | None, seed: int, as_json: bool, quick: bool = False) -> int:
    """`dmc-peer demo`: 0 when every check holds, 1 when one does not, 130 after Ctrl-C; UserError otherwise."""
    plan = plans.quick(seed) if quick else plans.full(seed)
    homes = _homes(keep)
    with tempfile.TemporaryDirectory(prefix="dmc-demo-") as folder, _signals_interrupt():
        try:
            return _perform(plan, Path(folder), homes or Path(folder), as_json)
        except KeyboardInterrupt:
            print("interrupted; no process is left", file=sys.stderr)
            return INTERRUPTED
        finally:
            if homes is not None:
                print(f"the peers' homes and logs are in {homes}", file=sys.stderr)


def _homes(keep: Path | None) -> Path | None:
    """The folder to keep, made; UserError when it cannot be or has something in it."""
    if keep is None:
        return None
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UserError(f"--keep {keep}: the folder is not empty; name a new one")
    except OSError as error:
        raise UserError(f"--keep {keep}: {error.strerror}; name a folder that can be made") from None
    return keep.resolve()


def _perform(plan: Plan, base: Path, homes: Path, as_json: bool) -> int:
    processes = Processes(base)
    screen = screens.choose(as_json)
    try:
        outcome = Story(plan, base, homes, screen, processes).run()
    except KeyboardInterrupt:
        print("\nstopping the peers (Ctrl-C again: at once)", file=sys.stderr)
        raise
    finally:
        screen.close()
        processes.close(LEAVE_GRACE_S)
    summary = summaries.summarise(plan, outcome)
    if as_json:
        print(json.dumps(summaries.facts(summary)), flush=True)
    else:
        plain = not _unicode(sys.stdout.encoding)
        print("\n".join(summaries.report(summary, plain=plain)), flush=True)
    return 0 if summary.ok else 1


def _unicode(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "") == "utf8"


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """A closed terminal and a polite kill clean up as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
