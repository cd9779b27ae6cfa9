"""Draw the manual's diagrams: python docs/pictures/diagrams.py [--check].

The charts are drawn by charts.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from svg import Picture, text_width

WIDTH = 480


def one_step() -> Picture:
    """Return the picture of a training step on 3 ranks."""
    title = "A step on 3 ranks: the same script on each"
    picture = Picture(WIDTH, 306, title)
    picture.text(12, 22, title, "bold")
    picture.box(12, 36, WIDTH - 24, 30, "box")
    picture.text(WIDTH / 2, 56, "one batch of 256 rows of an HDF5 file", "middle")
    rows = ["rows 0 to 85", "rows 86 to 171", "rows 172 to 255"]
    for rank, text in enumerate(rows):
        left, width = 12 + rank * 156, 144
        middle = left + width / 2
        picture.arrow(middle, 66, middle, 84)
        picture.box(left, 86, width, 74, "box")
        picture.box(left, 86, width, 28, f"f{rank}")
        picture.text(middle, 105, f"rank {rank}", "middle on-color")
        picture.text(middle, 132, text, "small middle")
        picture.text(middle, 150, "your step", "middle")
        picture.arrow(middle, 160, middle, 178)
        picture.arrow(middle, 226, middle, 244)
        picture.box(left, 246, width, 30, "box")
        picture.text(middle, 266, "the same result", "middle")
    picture.box(12, 180, WIDTH - 24, 46, "box")
    picture.text(WIDTH / 2, 199, "strategy.reduce", "middle")
    compared = "the ranks compare the call, then add up; or all raise"
    picture.text(WIDTH / 2, 217, compared, "small middle")
    picture.text(WIDTH / 2, 296, "on any number of ranks", "small middle")
    return picture


def batch_slices() -> Picture:
    """Return the picture of a global batch of 7 rows on 3 replicas."""
    picture = Picture(WIDTH, 216, "A global batch of 7 rows, divided over 3 replicas")
    picture.text(12, 22, "A global batch of 7 rows on 3 replicas", "bold")
    picture.text(12, 40, "slices of ceil(7 / 3) = 3 rows, in order", "small")
    size, left = 36, 16
    starts = [(0, 3), (3, 6), (6, 7)]
    row_left = (WIDTH - 7 * (size + 4)) / 2
    for replica, (begin, end) in enumerate(starts):
        middle = 0.0
        for row in range(begin, end):
            x = row_left + row * (size + 4)
            picture.box(x, 56, size, size, f"f{replica}")
            picture.text(x + size / 2, 79, str(row), "middle on-color")
            middle += (x + size / 2) / (end - begin)
        x = left + replica * (3 * size + 12 + 38)
        target = x + 1.5 * (size + 4) - 2
        picture.line([(middle, 94), (middle, 104), (target, 116)], "arrow")
        picture.arrow(target, 116, target, 130)
        for place in range(3):
            left_edge = x + place * (size + 4)
            is_row = place < end - begin
            style = f"f{replica}" if is_row else "box"
            picture.box(left_edge, 134, size, size, style)
            if is_row:
                text = str(begin + place)
                picture.text(left_edge + size / 2, 157, text, "middle on-color")
        rows = f"{end - begin} row{'s' if end - begin > 1 else ''}"
        picture.text(target, 190, f"replica {replica}", "middle")
        picture.text(target, 206, rows, "small middle")
    return picture


def hierarchical_reduction() -> Picture:
    """Return the picture of a sum over 2 nodes of 2 ranks."""
    picture = Picture(WIDTH, 330, "all_reduce over 2 nodes with 2 ranks each")
    picture.text(12, 22, "all_reduce on 2 nodes with 2 ranks each", "bold")
    columns = [16, 126, 256, 366]
    names = ["rank 0", "rank 1", "rank 2", "rank 3"]
    for node in range(2):
        x = columns[2 * node] - 8
        picture.box(x, 34, 222, 288, "box")
        picture.text(x + 111, 52, f"node {node}", "middle")
    for rank, x in enumerate(columns):
        picture.text(x + 48, 72, names[rank], "small middle")
        for half in range(2):
            picture.box(x + 49 * half, 80, 47, 24, f"f{rank}")
            part = "ab"[half] + str(rank)
            picture.text(x + 49 * half + 23, 97, part, "middle on-color")
    _step(picture, 122, "1 add up parts in shared memory")
    for rank, x in enumerate(columns):
        first = rank // 2 * 2
        part = "ab"[rank % 2]
        picture.box(x, 146, 96, 24, f"f{rank}")
        text = f"{part}{first} + {part}{first + 1}"
        picture.text(x + 48, 163, text, "middle on-color")
    _step(picture, 190, "2 exchange between nodes, add up")
    for rank, x in enumerate(columns):
        picture.box(x, 214, 96, 24, f"f{rank % 2}")
        text = f"sum of all {'ab'[rank % 2]}"
        picture.text(x + 48, 231, text, "middle on-color")
    _step(picture, 258, "3 read both parts from shared memory")
    for x in columns:
        for half in range(2):
            picture.box(x + 49 * half, 282, 47, 24, f"f{half}")
            picture.text(x + 49 * half + 23, 299, f"Σ {'ab'[half]}", "middle on-color")
    return picture


def _step(picture: Picture, y: float, text: str) -> None:
    width = text_width(text, 12)
    picture.box((WIDTH - width) / 2, y - 7, width, 21, "paper")
    picture.text(WIDTH / 2, y + 8, text, "small middle")
    for x in (48, 432):
        picture.arrow(x, y - 14, x, y + 20)


def _steps(title: str, steps: list[tuple[str, str, str]], beside: str) -> Picture:
    """Return boxes from top to bottom, each with a name and what happens there."""
    height = 50 + len(steps) * 62
    picture = Picture(WIDTH, height, title)
    picture.text(12, 22, title, "bold")
    picture.text(WIDTH - 12, 22, beside, "small end")
    for number, (name, first, second) in enumerate(steps):
        y = 38 + number * 62
        picture.box(12, y, WIDTH - 24, 44, "box")
        picture.box(12, y, 112, 44, "f0")
        picture.text(68, y + 27, name, "middle on-color")
        picture.text(136, y + (19 if second else 27), first, "small")
        if second:
            picture.text(136, y + 35, second, "small")
        if number + 1 < len(steps):
            picture.arrow(68, y + 44, 68, y + 62)
    return picture


def way_of_an_array() -> Picture:
    """Return the picture of the steps of a collective."""
    steps = [
        ("key", "operation, structure; of each array", "dtype, shape and location"),
        (
            "plan",
            "looked up by the key, made once: checks,",
            "digest, layout of packs, transport",
        ),
        ("reserve", "memory for results, conversions:", "whatever can still fail"),
        (
            "consensus",
            "ranks compare digests and errors; small",
            "arrays travel along. All raise, or none",
        ),
        (
            "move",
            "shared memory, MPI, NCCL, CUDA IPC:",
            "nothing may fail on one rank alone here",
        ),
        ("wrap", "results have the type and structure", "of the arguments"),
    ]
    return _steps("The way of an array", steps, "in every collective call")


def way_of_a_row() -> Picture:
    """Return the picture of the steps from a file to a replica."""
    steps = [
        (
            "index",
            "one rank reads where rows lie in a file,",
            "and sends that to the others",
        ),
        (
            "order",
            "the place of a row in the epoch is a",
            "function of the seed; nothing is stored",
        ),
        (
            "read",
            "this rank's rows of the next steps: memory",
            "map, pread, or whole chunks",
        ),
        ("decode", "gzip, shuffle and fletcher32, in threads", ""),
        (
            "map",
            "functions of the program; then the copy",
            "to the GPU, if there is one",
        ),
        (
            "compare",
            "ranks compare lengths and errors of",
            "several steps at once; then next() returns",
        ),
    ]
    return _steps("The way of a row", steps, "ahead of the step that needs it")


DIAGRAMS = {
    "one_step": one_step,
    "batch_slices": batch_slices,
    "hierarchical_reduction": hierarchical_reduction,
    "way_of_an_array": way_of_an_array,
    "way_of_a_row": way_of_a_row,
}


def main(is_check: bool) -> int:
    """Write the diagrams, or say which is not up to date."""
    stale = 0
    for name, diagram in DIAGRAMS.items():
        path = Path(__file__).with_name(f"{name}.svg")
        if not is_check:
            diagram().write(path)
        elif not path.exists() or path.read_text() != str(diagram()):
            print(f"{path} is not up to date")
            stale += 1
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
