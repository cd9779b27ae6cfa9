"""Where a rank is in things that ranks go through together, without communication."""

from __future__ import annotations

import functools
import hashlib
import operator
import threading

__all__ = ["Places"]


class Places(threading.local):
    """Numbers by name, which must be the same on all ranks at each collective.

    So ranks may go on alone within what they have agreed on before, and yet the next
    collective of any kind finds out if one has gone farther than another. Each thread
    has its own: how far it has gone when another one communicates is chance.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        # None where it is to be computed
        self._digest: int | None = 0

    @property
    def digest(self) -> int:
        """62 bits that are the same in every process for the same places."""
        if self._digest is None:
            hashes = (_hash(name, place) for name, place in self._places.items())
            self._digest = functools.reduce(operator.xor, hashes, 0)
        return self._digest

    def note(self, name: str, place: int) -> None:
        """Say that this rank is at `place` of `name`."""
        self._places[name] = place
        self._digest = None

    def add(self, name: str, count: int) -> None:
        """Note that this rank is `count` farther in `name` than before."""
        self.note(name, self._places.get(name, 0) + count)

    def forget(self, name: str) -> None:
        """Say that this rank is through with `name`, if it has begun with it."""
        if self._places.pop(name, None) is not None:
            self._digest = None

    def describe(self) -> dict[str, str]:
        """Return each place by its name."""
        return {name: str(place) for name, place in self._places.items()}


@functools.lru_cache(maxsize=64)
def _hash(name: str, place: int) -> int:
    hashed = hashlib.blake2b(f"{name}\n{place}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2
