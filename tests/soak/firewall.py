"""A joiner whose machine lets the agents' ports through and nothing else: the others must go on without it.

    python tests/soak/firewall.py --out

Two hosts (network namespaces, so root) train. A third joins whose firewall drops what the collective needs. The
others try twice, 15 s each, and then let it in less and less often; the joiner says why. Then the firewall goes, and
it trains.

The last line of standard output with --json is one object with these keys:
  stalls_s     how long the others stood still: the longest pause between two of their rounds, for each attempt
  rounds       of the others, while the firewall stood
  told         whether the joiner was told the likely reason
  problems     what went wrong, in words
Exit code 1 if the others did not go on, the joiner was not told, or anybody differed or lost a sample.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.soak.hosts import Hosts, missing_tools  # noqa: E402
from tests.system.cluster import DMC_PEER, Peer, write_samples  # noqa: E402
from tests.system.scenario import arguments, finish, train_together  # noqa: E402

RESULT = Path(__file__).parent / "results" / "firewall.json"
EPOCHS = 200
PATIENCE_S = 48.0
"""Two attempts of 15 s, and then a while of undisturbed rounds."""
STALL_S = 5.0
BACK_S = 180.0
"""The third attempt comes half a minute after the second one has failed, a fourth a minute after that."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same: it takes about two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument("--out", action="store_true", help=f"write the result to {RESULT.relative_to(ROOT)}")
    args = parser.parse_args()
    if missing := missing_tools():
        print(f"firewall.py: {missing}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"stalls_s": [], "rounds": 0, "told": False, "problems": []}
    with tempfile.TemporaryDirectory(prefix="dmc-firewall-") as folder:
        try:
            play(Path(folder), args.seed, result)
        except AssertionError as error:
            result["problems"].append(str(error).partition("\n")[0])
    if args.out:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if args.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    return int(bool(result["problems"]))


def play(folder: Path, seed: int, result: dict[str, Any]) -> None:
    data = write_samples(folder / "tiny", 320, seed)
    with Hosts(folder / "peers", ("seed", "b", "c")) as hosts:
        first = hosts.seed(data, "--name", "tiny", "--insecure", address=hosts.address_of("seed"))
        said = arguments(hosts, "--delay-ms", "30", epochs=EPOCHS)

        def join(name: str, *options: str) -> Peer:
            listen = [] if name == "seed" else ["--insecure", "--listen", hosts.address_of(name)]
            peer = hosts.join(name, first, *said, options=[*options, *listen])
            hosts.listening(peer)
            return peer

        others = [join(name, "--min-peers", "2") for name in ("seed", "b")]
        train_together(hosts, others)
        joiner = join("c")
        close_ports(hosts, joiner, first)
        when = time.time()
        hosts.wait(lambda: time.time() > when + PATIENCE_S, "the others had time", PATIENCE_S + 30)
        lines = others[0].rounds(when)
        gaps = [two["time"] - one["time"] for one, two in pairwise(lines)]
        result["stalls_s"] = [round(gap, 1) for gap in gaps if gap > STALL_S]
        result["rounds"] = len(lines)
        result["told"] = "reductions with this peer fail" in joiner.said()
        assert lines and time.time() - lines[-1]["time"] < STALL_S, "the others stand still"
        assert result["stalls_s"], "the firewall stopped nothing"
        assert result["told"], "the joiner was not told why"
        subprocess.run([*hosts.inside(joiner), "nft", "delete", "table", "inet", "closed"], check=True)
        hosts.wait(lambda: joiner.rounds(), "the joiner trains once it can be reached", BACK_S)
        finish(hosts, [*others, joiner], epochs=EPOCHS)


def close_ports(hosts: Hosts, joiner: Peer, seed: Peer) -> None:
    """Only the agents' ports remain."""
    command = [*hosts.inside(joiner), str(DMC_PEER), "status", seed.address, "--json"]
    members = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)[
        "members"
    ]
    ports = {m[kind].rsplit(":", 1)[1] for m in members for kind in ("address", "bulk_address")}
    open_ports = ", ".join(sorted(ports))
    rules = (
        "table inet closed { chain input { type filter hook input priority 0; policy accept;\n"
        f"tcp dport {{ {open_ports} }} accept;\ntcp sport {{ {open_ports} }} accept;\n"
        "meta l4proto tcp iif != lo drop;\n}\n}\n"
    )
    subprocess.run([*hosts.inside(joiner), "nft", "-f", "-"], input=rules, text=True, check=True)


if __name__ == "__main__":
    sys.exit(main())
