#!/usr/bin/env python3
"""Cables between virtual nodes that delay what they carry, on kernels without netem.

`delayed_cables.py COUNT SECONDS` makes pairs of network interfaces, `portN` and
`wireN`, and prints 0 when they are there. What enters one of a pair leaves the other so
much later. It ends, and they with it, at the end of its standard input. Each packet
takes some microseconds of a core, so this is for latencies, not for high rates.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import sys
import time

_SET_NAME = 0x400454CA  # TUNSETIFF of linux/if_tun.h
_TAP, _NO_HEADER = 0x2, 0x1000
_MOST_BYTES = 1 << 16


def _make(name: str) -> int:
    """Return the file of a new network interface."""
    interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    wanted = struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER)
    fcntl.ioctl(interface, _SET_NAME, wanted)
    return interface


def _carry(others: dict[int, int], seconds: float) -> None:
    """Pass packets on until the standard input ends."""
    held: collections.deque[tuple[float, int, bytes]] = collections.deque()
    poll = select.poll()
    for source in (0, *others):
        poll.register(source, select.POLLIN)
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        # Rounded up, so that nothing is early
        ready = poll.poll(None if wait is None else int(wait * 1000) + 1)
        for source, event in ready:
            if source == 0:
                return
            if event & select.POLLIN:
                packet = os.read(source, _MOST_BYTES)
                held.append((time.monotonic() + seconds, others[source], packet))
        while held and held[0][0] <= time.monotonic():
            _, target, packet = held.popleft()
            try:
                os.write(target, packet)
            except OSError:  # it is down, or has no room: the packet is lost
                continue


def main() -> None:
    count, seconds = int(sys.argv[1]), float(sys.argv[2])
    others = {}
    for number in range(count):
        port, wire = _make(f"port{number}"), _make(f"wire{number}")
        others[port], others[wire] = wire, port
    os.nice(-20)  # a packet waits for its time, not for a core
    print(0, flush=True)
    _carry(others, seconds)


if __name__ == "__main__":
    main()
