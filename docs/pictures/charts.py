"""Draw the manual's charts: mpidist beside what one would take instead.

    python docs/pictures/charts.py            from benchmarks/results/*.json
    python docs/pictures/charts.py --check    say which picture is not up to date

Absolute times and rates, and the physical limit as a line, with grey beyond it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from svg import Picture, text_width

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PICTURES = Path(__file__).parent
WIDTH = 480
LEFT, RIGHT, PLOT = 62, 16, 230
MPI, GLOO, TENSORFLOW = "MPI (mpi4py)", "torch gloo", "TensorFlow"
COLORS = {"mpidist": 0, MPI: 1, GLOO: 2, TENSORFLOW: 3}

Points = list[tuple[float, float]]


def load(name: str) -> Any:
    """Return the results of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def size_of(case: str) -> int | None:
    """Return the bytes of a case such as "all_reduce, 1,024 bytes"."""
    found = re.fullmatch(r"all_reduce, ([\d,]+) bytes", case)
    return int(found[1].replace(",", "")) if found else None


def times_by_size(
    comparisons: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> dict[str, Points]:
    """Return bytes and seconds of mpidist, and of others by `names`."""
    lines: dict[str, dict[int, float]] = {"mpidist": {}}
    for c in comparisons:
        size = size_of(c["case"])
        if size is not None:
            lines["mpidist"][size] = c["ours"] / 1e6
            if c["against"] in names:
                other = lines.setdefault(names[c["against"]], {})
                other[size] = c["theirs"] / 1e6
    return {name: sorted(line.items()) for name, line in lines.items()}


def bytes_text(size: float) -> str:
    """Return a size in bytes, KiB, MiB or GiB."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B"


def seconds_text(seconds: float) -> str:
    """Return a time with its unit."""
    for unit, factor in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor * 0.9999:
            return f"{seconds / factor:g} {unit}"
    return f"{seconds * 1e9:g} ns"


def legend(picture: Picture, names: Sequence[str], limit: str, y: float) -> float:
    """Write which line is which, in as many rows as that takes; return the next y."""
    x = float(LEFT)
    for name in [*names, limit]:
        width = 26 + text_width(name, 12) + 14
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 18
        if name == limit:
            picture.area([(x, y - 4), (x + 20, y - 4), (x + 20, y), (x, y)], "beyond")
        style = "limit" if name == limit else f"line s{COLORS[name]}"
        picture.line([(x, y - 4), (x + 20, y - 4)], style)
        picture.text(x + 26, y, name, "small")
        x += width
    return y + 14


def draw_times(
    title: str, subtitle: str, lines: Mapping[str, Points], limit: tuple[str, Points]
) -> Picture:
    """Return the chart of times by sizes, on logarithmic axes."""
    every = [p for line in (*lines.values(), limit[1]) for p in line]
    low, high = (f(math.log10(t) for _, t in every) for f in (min, max))
    low, high = math.floor(low), math.ceil(high)
    first, last = (math.log2(f(size for size, _ in every)) for f in (min, max))
    picture = Picture(WIDTH, 0, f"{title}: {subtitle}")
    picture.text(12, 22, title, "bold")
    picture.text(12, 40, subtitle, "small")
    top = legend(picture, list(lines), limit[0], 62)
    bottom = top + PLOT
    picture.height = int(bottom + 44)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (math.log2(point[0]) - first) / (last - first)
        y = (math.log10(point[1]) - low) / (high - low)
        return LEFT + x * (WIDTH - LEFT - RIGHT - 14), bottom - y * PLOT

    # What nothing can reach is grey, since a line that is at the limit hides it
    edge = [place(point) for point in limit[1]]
    picture.area([(edge[0][0], bottom), *edge, (edge[-1][0], bottom)], "beyond")
    for power in range(low, high + 1):
        y = place((2**first, 10.0**power))[1]
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], "grid")
        picture.text(LEFT - 6, y + 4, seconds_text(10.0**power), "small end")
    for power in range(math.ceil(first), int(last) + 1):
        if power % 5 == 3 if first < 10 else power % 2 == 0:
            x = place((2.0**power, 1.0))[0]
            picture.line([(x, bottom), (x, bottom + 5)], "axis")
            picture.text(x, bottom + 20, bytes_text(2**power), "small middle")
    picture.text((LEFT + WIDTH) / 2, bottom + 38, "size of the array", "small middle")
    for name, line in reversed(lines.items()):  # mpidist above the others
        picture.line(map(place, line), f"line s{COLORS[name]}")
        for point in line:
            picture.dot(*place(point), f"f{COLORS[name]}")
    picture.line(edge, "limit")
    return picture


def all_reduce() -> Picture:
    """Return the chart of all_reduce in a node."""
    ours = load("collectives-mpich-2ranks")["comparisons"]
    names = {"raw MPI": MPI, "torch gloo": GLOO, "copy": "copy"}
    lines = times_by_size(ours, names)
    limit = lines.pop("copy")
    theirs = load("collectives-tensorflow-2ranks")["comparisons"]
    lines[TENSORFLOW] = times_by_size(theirs, {"TF MultiWorkerMirrored": TENSORFLOW})[
        TENSORFLOW
    ]
    return draw_times(
        "Time of all_reduce, 2 ranks of one node (lower is better)",
        "float32, MPICH; TensorFlow: MultiWorkerMirroredStrategy",
        lines,
        ("limit: copying the array", limit),
    )


def network() -> Picture:
    """Return the chart of all_reduce between two nodes."""

    def of_two_nodes(name: str) -> Any:
        layouts = load(name)["layouts"]
        return next(x for x in layouts if (x["nodes"], x["ranks_per_node"]) == (2, 1))

    layout = of_two_nodes("network-mpich")
    names = {"raw MPI": MPI, "torch gloo": GLOO}
    lines = times_by_size(layout["comparisons"], names)
    theirs = of_two_nodes("network-tensorflow")["comparisons"]
    lines[TENSORFLOW] = times_by_size(theirs, {"TF MultiWorkerMirrored": TENSORFLOW})[
        TENSORFLOW
    ]
    # Of 2 nodes each sends every byte once, at the speed of plain sockets
    speed = max(s["bytes_per_second"] for s in layout["sockets"])
    sizes = [size for size, _ in lines["mpidist"] if size >= 64 << 10]
    limit = [(size, size / speed) for size in sizes]
    return draw_times(
        "Time of all_reduce, 2 nodes, 1 Gbit/s (lower is better)",
        "float32, MPICH, virtual nodes",
        lines,
        ("limit: the bytes alone, by plain sockets", limit),
    )


def draw_bars(
    title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float, str]]]]
) -> Picture:
    """Return a chart of bars, a scale for each group.

    Args:
      title: of the chart.
      groups: heading, and bars: name, value, and "ours", "theirs" or "limit",
        which is a line and not a bar.
    """
    picture = Picture(WIDTH, 0, title)
    picture.text(12, 22, title, "bold")
    y = 34.0
    for heading, bars in groups:
        y += 16
        picture.text(12, y, heading)
        y += 8
        top = y
        limit = [(name, value) for name, value, kind in bars if kind == "limit"]
        largest = max(value for _, value, _ in bars)
        left, right = 170, 84
        scale = (WIDTH - left - right) / largest
        for name, value, kind in bars:
            if kind == "limit":
                continue
            picture.text(left - 8, y + 14, name, "small end")
            style = "f0" if kind == "ours" else "f1"
            picture.box(left, y + 2, max(value * scale, 1), 15, style)
            picture.text(WIDTH - 12, y + 14, f"{rate_text(value)}/s", "small end")
            y += 20
        for name, value in limit:
            x = left + value * scale
            picture.line([(x, top), (x, y + 2)], "limit")
            picture.text(left, y + 15, f"dashed: {name}", "small")
            picture.text(WIDTH - 12, y + 15, f"{rate_text(value)}/s", "small end")
            y += 18
        y += 4
    picture.height = int(y + 10)
    return picture


def rate_text(value: float) -> str:
    """Return a rate with two or three digits."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g}"


def find(comparisons: Sequence[Mapping[str, Any]], case: str, against: str) -> Any:
    """Return one comparison."""
    return next(c for c in comparisons if c["case"] == case and c["against"] == against)


def throughput() -> Picture:
    """Return the chart of training steps."""
    step = load("step-mpich-2ranks")["comparisons"]
    case = "training step, 2 ranks"
    hand, ddp = (find(step, case, a) for a in ("by hand", "torch DDP (gloo)"))
    groups = [
        (
            "NumPy, MLP 64-128-10, batch of 64: steps per second",
            [
                ("mpidist", 1e6 / hand["ours"], "ours"),
                ("torch DDP (gloo)", 1e6 / ddp["theirs"], "theirs"),
                ("by hand with mpi4py", 1e6 / hand["theirs"], "theirs"),
            ],
        )
    ]
    frameworks = load("frameworks-mpich")["comparisons"]
    for case, heading in (
        ("MLP of 10 M parameters", "PyTorch, MLP of 10 M parameters: rows per second"),
        ("ResNet, 8 images of 32x32", "PyTorch, ResNet, 32x32: images per second"),
    ):
        ddp = find(frameworks, case, "torch DDP (gloo)")
        alone = find(frameworks, case, "no communication")["theirs"]
        bars = [
            ("mpidist.torch", ddp["ours"], "ours"),
            ("torch DDP (gloo)", ddp["theirs"], "theirs"),
            ("without communication", alone, "limit"),
        ]
        groups.append((heading, bars))
    return draw_bars("Training on 2 ranks of one node (longer is better)", groups)


def reading() -> Picture:
    """Return the chart of reading HDF5."""
    found = load("input-2ranks")["comparisons"]
    groups = []
    for case, heading, others, limit in (
        (
            "contiguous, shuffle",
            "Contiguous, in random order",
            {
                "h5py, sorted fancy indexing": "h5py, sorted indices",
                "torch DataLoader, one row per call": "DataLoader, by row",
                "torch DataLoader, a batch per call": "DataLoader, by batch",
            },
            ("np.take from a memory map", "np.take from a memory map"),
        ),
        (
            "chunks of 128, shuffle",
            "Chunks of 128 rows, in random order",
            {
                "h5py, sorted fancy indexing": "h5py, sorted indices",
                "h5py, row by row, no chunk cache": "h5py, row by row",
            },
            None,
        ),
        (
            "chunks of 128, gzip-4, shuffle",
            "gzip, chunks of 128 rows; h5py: in order",
            {"h5py, in order": "h5py, in order"},
            None,
        ),
    ):
        first = find(found, case, next(iter(others)))
        bars = [("mpidist", first["ours"], "ours")]
        for against, name in others.items():
            value = find(found, case, against)["theirs"]
            bars.append((name, value, "theirs"))
        if limit is not None:
            value = find(found, case, limit[0])["theirs"]
            bars.append((limit[1], value, "limit"))
        groups.append((heading, bars))
    title = "Reading HDF5, 2 ranks: rows of 3 KiB (longer is better)"
    return draw_bars(title, groups)


def scaling() -> Picture:
    """Return the chart of rows per second by ranks."""
    result = load("scaling-mpich")
    rows = result["rows"]
    picture = Picture(WIDTH, 0, "Rows per second of the digits job by ranks")
    picture.text(12, 22, "The digits job by ranks (higher is better)", "bold")
    cores = result["machine"]["cores"]
    picture.text(12, 40, f"rows per second, {cores} cores of one machine", "small")
    kinds = {
        "strong": f"global batch of {result['batch']}",
        "weak": f"{result['batch']} rows for each rank",
    }
    x = float(LEFT)
    for number, name in enumerate(kinds.values()):
        picture.line([(x, 58), (x + 20, 58)], f"line s{number}")
        picture.text(x + 26, 62, name, "small")
        x += 26 + text_width(name, 12) + 14
    picture.line([(LEFT, 76), (LEFT + 20, 76)], "limit")
    picture.text(LEFT + 26, 80, "limit: as many times one rank", "small")
    top, bottom = 94.0, 94.0 + PLOT
    picture.height = int(bottom + 44)
    ranks = [r["ranks"] for r in rows if r["kind"] == "strong"]
    one = max(r["rows_per_second"] for r in rows if r["ranks"] == 1)
    largest = one * ranks[-1]

    def place(n: float, rate: float) -> tuple[float, float]:
        x = LEFT + (n - 1) / (ranks[-1] - 1) * (WIDTH - LEFT - RIGHT - 14)
        return x, bottom - rate / largest * (bottom - top)

    tick = 100_000
    for rate in range(0, int(largest) + 1, tick):
        y = place(1, rate)[1]
        picture.line([(LEFT, y), (WIDTH - RIGHT, y)], "grid")
        picture.text(LEFT - 6, y + 4, rate_text(rate) if rate else "0", "small end")
    for n in ranks:
        x = place(n, 0)[0]
        picture.line([(x, bottom), (x, bottom + 5)], "axis")
        picture.text(x, bottom + 20, str(n), "small middle")
    picture.text((LEFT + WIDTH) / 2, bottom + 38, "ranks", "small middle")
    picture.line([place(n, one * n) for n in ranks], "limit")
    for number, kind in enumerate(kinds):
        line = [
            place(r["ranks"], r["rows_per_second"]) for r in rows if r["kind"] == kind
        ]
        picture.line(line, f"line s{number}")
        for point in line:
            picture.dot(*point, f"f{number}")
    return picture


CHARTS = {
    "all_reduce": all_reduce,
    "network": network,
    "throughput": throughput,
    "input": reading,
    "scaling": scaling,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all charts, or say which are not up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--output", type=Path, default=PICTURES, help="a folder")
    options = parser.parse_args(arguments)
    stale = 0
    for name, chart in CHARTS.items():
        path = options.output / f"{name}.svg"
        picture = chart()
        if not options.check:
            picture.write(path)
        elif not path.exists() or path.read_text() != str(picture):
            print(f"{path} is not up to date")
            stale += 1
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
