"""Events of this process for a timeline, while there is one.

Recording an event is an append to a list; a thread of `monitor.timeline` takes them
from there. Nothing here raises, writes or communicates. All times are nanoseconds on
the clock of time.monotonic.
"""

from __future__ import annotations

import threading
from typing import Any

from mpidist.util.forks import call_in_child

__all__ = ["COLLECTIVE", "SPAN", "STEP", "TraceBuffer", "start", "stop"]

COLLECTIVE, SPAN, STEP = range(3)
_MOST_WAITING = 500_000  # events that nobody has taken: the disk does not answer
_get_ident = threading.get_ident
Totals = tuple[int, int, int, int, int]


class TraceBuffer:
    """The events that were recorded and not taken yet. Any thread may record.

    Attributes:
      stride: of how many steps the events of one are recorded.
      dropped: how many events were too many for the memory that is left to them.
    """

    def __init__(self) -> None:
        self.stride = 1
        self.dropped = 0
        self._events: list[tuple[Any, ...]] = []

    def collective(
        self,
        name: str,
        begun: int,
        ended: int,
        waiting: int,
        late: int,
        moved: int,
        transport: str,
    ) -> None:
        """Record a collective.

        Args:
          name: the operation.
          begun: when.
          ended: when.
          waiting: how long until all ranks had arrived.
          late: the rank that arrived last; -1 if that is unknown.
          moved: bytes.
          transport: the name of what moved them.
        """
        self._events.append(
            (
                COLLECTIVE,
                _get_ident(),
                name,
                begun,
                ended,
                waiting,
                late,
                moved,
                transport,
            )
        )

    def span(self, category: str, name: str, begun: int, ended: int) -> None:
        """Record anything else that has taken time."""
        self._events.append((SPAN, _get_ident(), name, begun, ended, category))

    def step(self, number: int, before: Totals, totals: Totals) -> None:
        """Record a step, with what was counted before and after it."""
        global active
        events = self._events
        if active is not None:
            parts = tuple([b - a for a, b in zip(before[1:], totals[1:])])
            events.append(
                (STEP, _get_ident(), number, before[0], totals[0], self.stride, *parts)
            )
        active = None if number % self.stride else self
        if len(events) > _MOST_WAITING:
            self.dropped += len(events)
            events.clear()

    def take(self) -> list[tuple[Any, ...]]:
        """Return the events since the last time. One thread does so."""
        events = self._events
        taken = events[:]
        del events[: len(taken)]  # others are appended meanwhile
        return taken


# Where events of steps go; None in steps that are left out, and without a timeline
active: TraceBuffer | None = None
# Where all others go
always: TraceBuffer | None = None


def start(buffer: TraceBuffer) -> None:
    """Record events from now on."""
    global active, always
    active = always = buffer


def stop() -> None:
    """Record no more events."""
    global active, always
    active = always = None


call_in_child(stop)
