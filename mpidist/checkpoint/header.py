"""The text at the beginning of a checkpoint's files: by what damage is found.

HDF5 leaves out such a "user block". Its first line tells its own length and checksum;
then follows JSON: the size of the file, the CRC-32 of each block of the large arrays,
and that of all else, which is the structure. So a file can be checked before HDF5 looks
at it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from typing import Any

from mpidist.errors import CheckpointError

__all__ = [
    "FORMAT",
    "LARGEST_STRUCTURE_BYTES",
    "Header",
    "Shard",
    "block_bytes",
    "parse",
    "parse_first",
    "render",
]

FORMAT = 1
_FIRST = "mpidist checkpoint {}, header of {:012} bytes, crc32 {:08x}\n"
_PATTERN = re.compile(
    rb"mpidist checkpoint (\d+), header of (\d{12}) bytes, crc32 ([0-9a-f]{8})\n"
)
_LINE_BYTES = len(_FIRST.format(FORMAT, 0, 0))
# A file may claim to have any size. More than this is not read before its checksum is
# known, and not written: headers of 16 TiB of arrays, and a million small arrays
_LARGEST_BYTES = 64 << 20
LARGEST_STRUCTURE_BYTES = 1 << 30
_SMALLEST = 4096  # the alignment of arrays, which HDF5 asks for
# Of the JSON text: all else, each block's offset, length and checksum, each shard
_FIXED_BYTES, _DATA_BYTES, _SHARD_BYTES = 1800, 60, 80


@dataclasses.dataclass(frozen=True)
class Shard:
    """A file that belongs to the checkpoint: its name, size and header's checksum."""

    name: str
    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What the text says.

    Args:
      serial: checkpoints of one folder are numbered in the order of their saving.
      size: of the file.
      structure_crc32: of all after the header that is not in `data`.
      data: offset, length and CRC-32 of blocks of arrays, in the order of the file.
      shards: the files that hold the rest.
      job: who has saved it, for people; nothing in shards and in older files.
    """

    serial: int
    size: int
    structure_crc32: int
    data: tuple[tuple[int, int, int], ...] = ()
    shards: tuple[Shard, ...] = ()
    job: str = ""


def block_bytes(data: int, shards: list[str]) -> int:
    """Return the length of a header of so many blocks, and shards of these names.

    Raises:
      CheckpointError: there are too many.
    """
    names = sum(len(json.dumps(name)) + _SHARD_BYTES for name in shards)
    needed = _LINE_BYTES + _FIXED_BYTES + data * _DATA_BYTES + names
    if needed > _LARGEST_BYTES:
        raise CheckpointError(
            f"{data} blocks of arrays and {len(shards)} shards need a header of "
            f"{needed} bytes, of at most {_LARGEST_BYTES}; join arrays, or save with "
            "more ranks"
        )
    return max(_SMALLEST, 1 << (needed - 1).bit_length())


def render(header: Header, length: int) -> bytes:
    """Return the header as so many bytes."""
    body = json.dumps(dataclasses.asdict(header), separators=(", ", ": "))
    padded = body.encode().ljust(length - _LINE_BYTES - 1) + b"\n"
    first = _FIRST.format(FORMAT, length, zlib.crc32(padded)).encode()
    assert len(first + padded) == length, "block_bytes was too small"
    return first + padded


def parse_first(data: bytes) -> tuple[int, int]:
    """Return the length of the header that begins with `data`, and its checksum.

    Raises:
      ValueError: it is none that this version reads.
    """
    match = _PATTERN.match(data)
    if match is None:
        raise ValueError("it does not begin as a checkpoint of mpidist does")
    version, length, crc32 = int(match[1]), int(match[2]), int(match[3], 16)
    if version != FORMAT:
        raise ValueError(f"its format is {version}; this mpidist reads {FORMAT}")
    if length > _LARGEST_BYTES:
        raise ValueError(f"it claims a header of {length} bytes")
    return length, crc32


def parse(data: bytes) -> Header:
    """Return what a whole header says.

    Raises:
      ValueError, KeyError, TypeError: it is damaged.
    """
    length, crc32 = parse_first(data)
    body = data[_LINE_BYTES:length]
    if len(data) < length or zlib.crc32(body) != crc32:
        raise ValueError("its header does not have the checksum that it tells")
    found = json.loads(body)
    header = Header(
        _integer(found["serial"]),
        _integer(found["size"]),
        _integer(found["structure_crc32"]),
        tuple((_integer(a), _integer(b), _integer(c)) for a, b, c in found["data"]),
        tuple(
            Shard(_file_name(s["name"]), _integer(s["size"]), _integer(s["crc32"]))
            for s in found["shards"]
        ),
        str(found.get("job", "")),
    )
    _require_order(header, length)
    structure = header.size - length - sum(size for _, size, _ in header.data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise ValueError(f"it claims a structure of {structure} bytes")
    return header


def _require_order(header: Header, end: int) -> None:
    """Raise if blocks overlap each other, or the end of the file."""
    for offset, size, _ in header.data:
        if offset < end or size < 1:
            raise ValueError(f"its header has a block of {size} bytes at {offset}")
        end = offset + size
    if end > header.size:
        raise ValueError(f"its header has blocks up to {end} of {header.size} bytes")


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"its header has {value!r} where an integer belongs")
    return value


def _file_name(value: Any) -> str:
    """Return the name of a file in the same folder, and in no other."""
    if type(value) is not str or "/" in value or value.strip(".") == "":
        raise ValueError(f"its header has {value!r} where a file's name belongs")
    return value
