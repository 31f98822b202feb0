"""The first node of hivemind's DHT; writes its address into the file that is named."""

from __future__ import annotations

import sys
import time

import hivemind


def main() -> None:
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    with open(sys.argv[1], "w") as file:
        file.write(str(dht.get_visible_maddrs()[0]))
    time.sleep(1e6)


if __name__ == "__main__":
    main()
