"""The buffer of this process's timeline events.

Recording an event appends to a list, which a thread of `monitor.timeline` empties.
Nothing here raises, writes files or communicates. All times are nanoseconds of
time.monotonic.
"""

from __future__ import annotations

import threading
from typing import Any

from mpidist.util.forks import call_in_child

COLLECTIVE, SPAN, STEP = range(3)
_MOST_WAITING = 500_000  # events in the buffer, if the disk does not respond
_get_ident = threading.get_ident
Totals = tuple[int, int, int, int, int]


class TraceBuffer:
    """Recorded events that were not written yet. Any thread may record.

    Attributes:
      stride: events are recorded in one of `stride` steps.
      dropped: the number of events that were dropped because the buffer was full.
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
          begun: its start.
          ended: its end.
          waiting: the time until all ranks had arrived.
          late: the rank that arrived last; -1 if unknown.
          moved: the number of bytes.
          transport: the name of the transport.
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
        """Record any other activity."""
        self._events.append((SPAN, _get_ident(), name, begun, ended, category))

    def step(self, number: int, before: Totals, totals: Totals) -> None:
        """Record a step, with the counters at its start and at its end."""
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
        """Remove and return all events. Only one thread may call it."""
        events = self._events
        taken = events[:]
        del events[: len(taken)]  # other threads may have appended meanwhile
        return taken


# The buffer for events within steps; None in skipped steps and without a timeline
active: TraceBuffer | None = None
# The buffer for all other events; None without a timeline
always: TraceBuffer | None = None


def start(buffer: TraceBuffer) -> None:
    """Record events in `buffer` from now on."""
    global active, always
    active = always = buffer


def stop() -> None:
    """Stop recording."""
    global active, always
    active = always = None


call_in_child(stop)
