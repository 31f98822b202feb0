"""``python -m p2p_dmc.train.main SCRIPT ARGS...``: runs a script as python would, until its agent is gone."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
import traceback
from types import TracebackType

from p2p_dmc.errors import UserError
from p2p_dmc.train.processes import die_with_parent, end_by

EXIT_INTERRUPTED = 130
REAP_WAIT_S = 1.0


def main(argv: list[str]) -> int:
    """Run the script; its exit code. A user's error is one line, a stopped run is success."""
    die_with_parent()  # where there is no such thing, the lifeline alone sees to it
    if not argv:
        print("usage: python -m p2p_dmc.train.main SCRIPT [ARGS...]", file=sys.stderr)
        return 2
    script = argv[0]
    sys.argv = argv
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:  # the script's own, and RunStopped
        return _exit_code(error)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 as python itself would
        traceback.print_exception(type(error), error, _from_script(error.__traceback__, script))
        if notes := getattr(error, "__notes__", ()):  # the last line is what the agent shows
            print(f"{type(error).__name__}: {error} ({'; '.join(notes)})", file=sys.stderr)
        if number := getattr(error, "worker_signal", 0):
            end_by(number)  # what killed a worker would have killed this process, without workers
        return 1
    return 0


def leave(code: int) -> None:
    """End the process as ``sys.exit`` would, except that a collective or a disk that is stuck cannot hold it."""
    stuck = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("dmc-reap-", "dmc-group-", "dmc-inner-"))
    ]
    for thread in stuck:
        thread.join(REAP_WAIT_S)
    if any(thread.is_alive() for thread in stuck):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _from_script(trace: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script's first line on: how it was started is not the user's business."""
    frame = trace
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame or trace


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
