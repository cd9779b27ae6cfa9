"""Where a rank is in things that ranks go through together, without communication."""

from __future__ import annotations

import hashlib

__all__ = ["Places"]


class Places:
    """Numbers by name, which must be the same on all ranks at each collective.

    So ranks may go on alone within what they have agreed on before, and yet the next
    collective of any kind finds out if one has gone farther than another.
    """

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, int]] = {}  # each place and its digest
        self.digest = 0  # of 62 bits, the same in every process for the same places

    def note(self, name: str, place: int) -> None:
        """Say that this rank is at `place` of `name`."""
        self.forget(name)
        digest = _hash(name, place)
        self._places[name] = place, digest
        self.digest ^= digest

    def forget(self, name: str) -> None:
        """Say that this rank is through with `name`, if it has begun with it."""
        _, digest = self._places.pop(name, (0, 0))
        self.digest ^= digest

    def describe(self) -> dict[str, str]:
        """Return each place by its name."""
        return {name: str(place) for name, (place, _) in self._places.items()}


def _hash(name: str, place: int) -> int:
    hashed = hashlib.blake2b(f"{name}\n{place}".encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "big") >> 2
