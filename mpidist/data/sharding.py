"""Which rows are read in which order. Integers only, no communication."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import operator

import numpy as np
import numpy.typing as npt

from mpidist.errors import ArgumentError

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def batch_count(rows: int, batch_size: int, drop_remainder: bool) -> int:
    """Return the number of batches of `rows` rows."""
    return rows // batch_size if drop_remainder else -(-rows // batch_size)


@dataclasses.dataclass(frozen=True)
class Permutation:
    """A pseudo-random permutation of `range(length)` that needs no table.

    (Up to 65,536 rows it uses a table, sorted by a hash of each row: a network of few
    rounds is not random enough on very short ranges, and the table is fast.)

    Beyond that, an alternating Feistel network on Z_a x Z_b with a * b >= length,
    walked along its cycle until it lands inside the range (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002, method 3). The round function is the
    finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Any position is
    computed in O(1) time and memory, so a run can start anywhere in an epoch.

    Args:
      length: how many integers are permuted.
      seed: which permutation, any integer.
      epoch: which of the permutations of that seed, any integer >= 0.
    """

    length: int
    seed: int
    epoch: int = 0

    # An even number, as rounds change the two halves in turn.
    _ROUNDS = 8

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """Return the row at each of `positions` (any shape, 0 <= position < length)."""
        positions = np.asarray(positions, dtype=np.int64)
        return self._rows(positions.reshape(-1)).reshape(positions.shape)

    def _rows(self, positions: Indices) -> Indices:
        if positions.size == 0:
            return positions
        # Negative numbers are large ones if they are taken as unsigned.
        if positions.view(np.uint64).max() >= self.length:
            self._require_inside(int(positions.min()), int(positions.max()))
        if self.length <= _TABLE_ROWS:
            return _table(self.length, self.seed, self.epoch)[positions]
        # unsigned 64-bit arithmetic wraps around, as SplitMix64 is defined.
        rows = self._encrypt(positions.astype(np.uint64))
        # Repeat for the few values outside of the range (cycle walking)
        while (outside := rows >= np.uint64(self.length)).any():
            # Only the values outside are walked on; a * b exceeds the range by little.
            rows[outside] = self._encrypt(rows[outside])
        return rows.astype(np.int64)

    def near(self, positions: Indices) -> Indices:
        """Return the row at each of `positions`, which should be close to each other.

        Computes and caches whole blocks of positions, which is faster.
        """
        if positions.size == 0 or self.length <= _TABLE_ROWS:
            return self._rows(positions)
        first, last = int(positions.min()), int(positions.max())
        self._require_inside(first, last)
        # Too far apart: whole blocks would compute more than they save.
        if last - first > _BLOCK_ROWS + 4 * positions.size:
            return self._rows(positions)
        numbers = range(first // _BLOCK_ROWS, last // _BLOCK_ROWS + 1)
        blocks = [_block(self, number) for number in numbers]
        rows = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        # Positions relative to the first block that was computed.
        nearby: Indices = rows[positions - numbers.start * _BLOCK_ROWS]
        return nearby

    def inverse(self, rows: npt.ArrayLike) -> Indices:
        """Return the position of each of `rows` (any shape, 0 <= row < length)."""
        rows = np.asarray(rows, dtype=np.int64)
        # The same limit as in `_rows`, or inverse and permutation would not match.
        if self.length <= _TABLE_ROWS:
            table = _table(self.length, self.seed, self.epoch)
            inverse: Indices = np.argsort(table)[rows]
            return inverse
        positions = self._decrypt(rows.reshape(-1).astype(np.uint64))
        while (outside := positions >= np.uint64(self.length)).any():
            positions[outside] = self._decrypt(positions[outside])
        return positions.astype(np.int64).reshape(rows.shape)

    def _require_inside(self, first: int, last: int) -> None:
        if first < 0 or last >= self.length:
            raise ArgumentError(
                f"positions must be in 0..{self.length - 1}, not {first}..{last}"
            )

    def _sides(self) -> tuple[np.uint64, np.uint64]:
        # a is about the square root, so both halves get about the same number of bits.
        a = math.isqrt(self.length - 1) + 1
        return np.uint64(a), np.uint64(-(-self.length // a))

    def _encrypt(self, x: Words) -> Words:
        a, b = self._sides()
        left = x // b
        right = x - left * b
        keys = _keys(self.seed, self.epoch, self._ROUNDS)
        for i in range(0, self._ROUNDS, 2):
            # Each half is shifted by a hash of the other one, so that it can be undone.
            left = _add(left, _draw(right, keys[i], a), a)
            right = _add(right, _draw(left, keys[i + 1], b), b)
        return left * b + right

    def _decrypt(self, x: Words) -> Words:
        a, b = self._sides()
        left = x // b
        right = x - left * b
        keys = _keys(self.seed, self.epoch, self._ROUNDS)
        for i in reversed(range(0, self._ROUNDS, 2)):
            # b - draw is the negative modulo b; unsigned numbers have no sign.
            right = _add(right, b - _draw(left, keys[i + 1], b), b)
            left = _add(left, a - _draw(right, keys[i], a), a)
        return left * b + right


_TABLE_ROWS = 1 << 16
_ROW_BITS = np.uint64(_TABLE_ROWS - 1)
_BLOCK_ROWS = 1 << 14
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_WORD = (1 << 64) - 1
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)
_FACTOR_2 = np.uint64(0x94D049BB133111EB)


@functools.lru_cache(maxsize=8)
def _table(length: int, seed: int, epoch: int) -> Indices:
    # Store each row in the low bits of its random key: `sort` is faster than `argsort`
    keys = _keys(seed, epoch, length) & ~_ROW_BITS
    keys |= np.arange(length, dtype=np.uint64)
    keys.sort()
    keys &= _ROW_BITS
    table: Indices = keys.view(np.int64)
    # It is cached and shared by all callers.
    table.flags.writeable = False
    return table


def mix_seed(seed: int, *numbers: int) -> int:
    """Derive a seed from `seed` and `numbers`."""
    for number in numbers:
        seed = int(_keys(seed, number, 1)[0])
    return seed


@functools.lru_cache(maxsize=8)
def _block(permutation: Permutation, number: int) -> Indices:
    start = number * _BLOCK_ROWS
    return permutation(np.arange(start, min(start + _BLOCK_ROWS, permutation.length)))


def _keys(seed: int, epoch: int, count: int) -> Words:
    """Return `count` pseudo-random words: SplitMix64 from a hash of seed and epoch."""
    # Hash seed and epoch one after the other, so that (1, 2) and (2, 1) differ.
    start = _mix_one(_mix_one(to_word(seed)) + to_word(epoch))
    states = np.arange(1, count + 1, dtype=np.uint64)
    states *= _GOLDEN
    states += np.uint64(start)
    return _mix(states)


def to_word(number: int) -> int:
    """Return 64 bits of an integer: the integer itself if it fits, else a hash."""
    number = operator.index(number)
    if 0 <= number < 1 << 64:
        # Small seeds stay as they are: orders of former versions depend on it.
        return number
    digest = hashlib.blake2b(str(number).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mix(x: Words) -> Words:
    z: Words = x + _GOLDEN
    z ^= z >> _SHIFTS[0]
    z *= _FACTOR_1
    z ^= z >> _SHIFTS[1]
    z *= _FACTOR_2
    z ^= z >> _SHIFTS[2]
    return z


def _mix_one(x: int) -> int:
    """Return what `_mix` does for one state, several times as fast."""
    z = (x + int(_GOLDEN)) & _WORD
    z = (z ^ z >> 30) * int(_FACTOR_1) & _WORD
    z = (z ^ z >> 27) * int(_FACTOR_2) & _WORD
    return z ^ z >> 31


def _draw(x: Words, key: np.uint64, size: np.uint64) -> Words:
    """Return a pseudo-random number below `size` for each of `x`.

    Without a division (Lemire, "Fast random integer generation in an interval", ACM
    TOMACS 2019): the high half of a product of 32-bit numbers.
    """
    z = _mix(x + key)
    # 32 bits of the hash times the size, of which the high half is below the size.
    z >>= _HALF
    z *= size
    z >>= _HALF
    return z


def _add(x: Words, y: Words, size: np.uint64) -> Words:
    x = x + y
    # If x < size, the unsigned difference wraps around to a larger number
    return np.minimum(x, x - size)
