"""Charts of results, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OURS, THEIRS, MISSED = "#1f6f8b", "#b4bbc2", "#c8553d"


def draw(chart: Callable[[Any], Any], result: Mapping[str, Any], path: Path) -> None:
    """Write a chart as PNG; say so if that cannot be."""
    if importlib.util.find_spec("matplotlib") is None:
        print(f"matplotlib is not installed: {path.name} was not drawn")
        return
    import matplotlib

    matplotlib.use("Agg")
    figure = chart(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def draw_input(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_input.py`: rates, and ratios by their targets."""
    from matplotlib import pyplot

    rated = [c for c in result["comparisons"] if c["unit"] == "rows/s"]
    judged = [c for c in result["comparisons"] if c["target"] is not None]
    parts = [(f, x) for f, x in ((_draw_rates, rated), (_draw_targets, judged)) if x]
    height = 1.4 + 0.34 * max(len(rated) + 4, len(judged))
    figure, axes = pyplot.subplots(
        1, len(parts), figsize=(7.5 * len(parts), height), squeeze=False
    )
    for axis, (part, comparisons) in zip(axes[0], parts, strict=True):
        part(axis, comparisons)
    machine, ranks = result["machine"], result["ranks"]
    figure.suptitle(
        f"Reading HDF5, {ranks} rank{'s' if ranks > 1 else ''}: {machine['cpu']}, "
        f"{machine['cores']} cores, {machine['file_system']}, HDF5 {machine['hdf5']}",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def _draw_rates(axis: Any, comparisons: list[dict[str, Any]]) -> None:
    """Draw ours and the others, case by case."""
    bars: list[tuple[str, float, str]] = []
    cases = itertools.groupby(comparisons, key=lambda c: c["case"])
    for case, group in cases:
        others = list(group)
        bars.append((f"$\\bf{{mpidist}}$: {case}", others[0]["ours_median"], OURS))
        bars += [(c["against"], c["theirs_median"], THEIRS) for c in others]
    names, rates, colors = zip(*bars, strict=True)
    places = range(len(bars))
    axis.barh(places, rates, color=colors, height=0.72)
    for place, rate in zip(places, rates, strict=True):
        axis.annotate(
            f"{rate:,.0f}", (rate, place), (3, 0), textcoords="offset points",
            va="center", fontsize=8,
        )  # fmt: skip
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlim(min(rates) / 4, max(rates) * 6)
    _clean(axis, "rows per second, all ranks")


def _draw_targets(axis: Any, comparisons: list[dict[str, Any]]) -> None:
    """Draw how far each ratio is from its target; further right is better."""
    for place, c in enumerate(comparisons):
        better = c["ratio"] / c["target"]
        better = better if c["is_at_least"] else 1 / better
        color = OURS if c["is_reached"] else MISSED
        axis.plot([1, better], [place, place], color=color, linewidth=2)
        axis.plot(better, place, "o", color=color)
        sign = "≥" if c["is_at_least"] else "≤"
        axis.annotate(
            f"{c['ratio']:.3g} ({sign} {c['target']:g})", (better, place), (0, 6),
            textcoords="offset points", ha="center", fontsize=8,
            bbox={"color": "white", "pad": 1},
        )  # fmt: skip
    names = [f"{c['case']}\n{c['against']}" for c in comparisons]
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.8)
    axis.set_xscale("log")
    axis.margins(x=0.2)
    _clean(axis, "how many times better than the target (1: reached)")


def draw_metadata(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_metadata.py`: operations by what varies."""
    from matplotlib import pyplot, ticker

    summaries = result["summaries"]
    names = list(summaries[0]["metadata_by"])
    has_clusters = "clusters" in summaries[0]
    count = len(names) + has_clusters
    figure, axes = pyplot.subplots(1, count, figsize=(3.1 * count, 3.6))
    for summary in summaries:
        is_ours = summary["reader"] == "mpidist"
        is_compressed = summary["layout"] == "gzip"
        style = {
            "label": f"{summary['reader']}, {summary['layout']}",
            "color": OURS if is_ours else "0.55",
            "marker": "o" if is_compressed else "s",
            "linestyle": ":" if is_compressed else "-",
            "markersize": 4 if is_compressed else 8,
            "markerfacecolor": "white" if not is_compressed else None,
        }
        for axis, name in zip(axes, names, strict=False):
            seen = summary["metadata_by"][name]
            axis.plot([int(n) for n in seen], list(seen.values()), **style)
        if has_clusters:
            ranks, requests = zip(
                *((c["ranks"], c["mds_requests"]) for c in summary["clusters"]),
                strict=True,
            )
            axes[-1].loglog(ranks, requests, **style)
    highest = max(max(s["metadata_by"][n].values()) for s in summaries for n in names)
    for axis, name in zip(axes, names, strict=False):
        axis.set_ylim(0, 1.1 * highest)
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        _clean(axis, f"{name} per epoch" if name == "steps" else name, "both")
    axes[0].set_ylabel("metadata operations of a rank", fontsize=9)
    if has_clusters:
        axes[-1].set_ylabel("MDS requests of the large job", fontsize=9)
        _clean(axes[-1], "ranks (extrapolated)", "both")
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return figure


def _clean(axis: Any, label: str, grid: str = "x") -> None:
    axis.set_xlabel(label, fontsize=9)
    axis.grid(axis=grid, color="0.9")
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def draw_collectives(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_collectives.py`: times by size, and ratios."""
    from matplotlib import pyplot

    judged = [c for c in result["comparisons"] if c["target"] is not None]
    figure, (sizes, targets) = pyplot.subplots(1, 2, figsize=(15, 6))
    curves: dict[str, list[tuple[int, float]]] = {}
    for comparison in result["comparisons"]:
        kind, _, rest = comparison["case"].partition(", ")
        if kind != "all_reduce":
            continue
        size = int(rest.removesuffix(" bytes").replace(",", ""))
        curves.setdefault("mpidist", []).append((size, comparison["ours_median"]))
        curves.setdefault(comparison["against"], []).append(
            (size, comparison["theirs_median"])
        )
    for name, points in curves.items():
        width = 2.5 if name == "mpidist" else 1.2
        sizes.loglog(*zip(*sorted(set(points)), strict=True), lw=width, label=name)
    sizes.set(xlabel="bytes", ylabel="microseconds per all-reduce")
    sizes.legend()
    if judged:
        _draw_targets(targets, judged)
    machine = result["machine"]
    figure.suptitle(
        f"Collectives, {result['ranks']} ranks: {machine['cpu']}, {machine['cores']} "
        f"cores, {machine['mpi']}",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def draw_model(result: Mapping[str, Any]) -> Any:
    """Return the figure of `cost_model.py`: times by ranks, for each size."""
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(curve["size"] for curve in result["curves"]))
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4))
    for axis, size in zip(axes, sizes, strict=True):
        for curve in result["curves"]:
            if curve["size"] == size:
                milliseconds = [s * 1e3 for s in curve["seconds"]]
                label = curve["network"]
                axis.loglog(curve["ranks"], milliseconds, marker="o", ms=3, label=label)
        axis.set_title(size, fontsize=10)
        axis.set_ylabel("milliseconds per all-reduce (model)", fontsize=9)
        axis.legend(fontsize=8, frameon=False)
        _clean(axis, f"ranks, {result['ranks_per_node']} per node", "both")
    node = result["node"]
    figure.suptitle(
        f"In a node, fitted: {node['latency'] * 1e6:.1f} us + bytes / "
        f"{node['bandwidth'] / 1e9:.2f} GB/s",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


_UNITS = {1 << 20: "MiB", 1 << 10: "KiB", 1: "bytes"}


def _in_bytes(size: int) -> str:
    unit = next(unit for unit in _UNITS if size >= unit)
    return f"{size // unit} {_UNITS[unit]}"


def draw_network(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_network.py`: all-reduces by size, for each layout."""
    from matplotlib import pyplot

    layouts = result["layouts"]
    columns = min(2, len(layouts))
    rows = -(-len(layouts) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(6 * columns, 3.6 * rows), squeeze=False
    )
    colors = {"raw MPI": "0.45", "torch gloo": MISSED, "plain sockets": "0.75"}
    for axis, layout in zip(axes.flat, layouts, strict=False):
        curves: dict[str, dict[int, float]] = {"mpidist": {}}
        for found in layout["comparisons"]:
            kind, _, size = found["case"].removesuffix(" bytes").partition(", ")
            number = size.replace(",", "")
            if kind == "all_reduce" and number.isdecimal():
                curves["mpidist"][int(number)] = found["ours_median"] / 1e3
                theirs = curves.setdefault(found["against"], {})
                theirs[int(number)] = found["theirs_median"] / 1e3
        for name, times in curves.items():
            style = ":" if name == "plain sockets" else "-"
            label = "the network alone" if name == "plain sockets" else name
            color = OURS if name == "mpidist" else colors.get(name, THEIRS)
            axis.loglog(
                *zip(*sorted(times.items()), strict=True), style, marker="o", ms=3,
                color=color, label=label,
            )  # fmt: skip
        sizes = sorted(curves["mpidist"])
        axis.set_xticks(sizes, map(_in_bytes, sizes), fontsize=8)
        axis.set_title(
            f"{layout['nodes']} nodes of {layout['ranks_per_node']} ranks", fontsize=10
        )
        axis.set_ylabel("milliseconds per all_reduce", fontsize=9)
        axis.legend(fontsize=8, frameon=False)
        _clean(axis, "float32", "both")
    figure.suptitle(
        f"Virtual nodes, {result['rate']} Ethernet; all on "
        f"{result['machine']['cores']} cores",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def draw_scaling(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_scaling.py`: speedups by ranks."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 4))
    rows = result["rows"]
    for kind, color in (("strong", OURS), ("weak", MISSED)):
        points = [(r["ranks"], r["speedup"]) for r in rows if r["kind"] == kind]
        axis.plot(*zip(*points, strict=True), marker="o", color=color, label=kind)
    ranks = sorted({row["ranks"] for row in rows})
    axis.plot(ranks, [n / ranks[0] for n in ranks], ":", color="0.6", label="ideal")
    axis.set_ylabel("rows per second, by those of one rank", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    _clean(axis, f"ranks ({result['machine']['cores']} cores)", "both")
    figure.tight_layout()
    return figure


def draw_frameworks(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_frameworks.py`: ratios, and what they have to be."""
    from matplotlib import pyplot

    rows = result["comparisons"]
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.4 * max(len(rows), 1)))
    names = [f"{c['case']}\nby {c['against']}, {c['unit']}" for c in rows]
    ratios = [c["ratio"] for c in rows]
    axis.barh(names, ratios, color=OURS, height=0.7)
    for place, comparison in enumerate(rows):
        axis.annotate(
            f"{comparison['ratio']:.2f}", (comparison["ratio"], place), (3, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
        if comparison["target"] is not None:
            axis.plot([comparison["target"]] * 2, [place - 0.4, place + 0.4], "k--")
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.margins(x=0.12)
    axis.set_title(
        f"{'JAX' if 'jax' in result else 'Models of PyTorch'}, ranks: "
        f"{result['ranks']}, {result['machine']['cpu']}",
        fontsize=9,
    )
    _clean(axis, "mpidist by the other; dashed: wanted")
    figure.tight_layout()
    return figure


def draw_step(result: Mapping[str, Any]) -> Any:
    """Return the figure of `bench_step.py`: the time of a step, one bar for each."""
    from matplotlib import pyplot

    comparisons = result["comparisons"]
    bars = [("mpidist", comparisons[0]["ours_median"])]
    bars += [(c["against"], c["theirs_median"]) for c in comparisons]
    names, times = zip(*bars, strict=True)
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.4 * len(bars)))
    axis.barh(names, times, color=[OURS, *[THEIRS] * (len(bars) - 1)], height=0.7)
    for place, microseconds in enumerate(times):
        axis.annotate(
            f"{microseconds:,.0f}", (microseconds, place), (3, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axis.invert_yaxis()
    axis.margins(x=0.12)
    ranks = result["ranks"]
    axis.set_title(
        f"Training step, {ranks} rank{'s' if ranks > 1 else ''}: "
        f"{result['machine']['cpu']}, {result['machine']['cores']} cores",
        fontsize=9,
    )
    _clean(axis, "microseconds per step")
    figure.tight_layout()
    return figure


def draw_gpu(result: Mapping[str, Any]) -> Any:
    """Return the figure of `gpu/run_all.py`: times by size, and ratios."""
    from matplotlib import pyplot

    judged = [c for c in result["comparisons"] if c["target"] is not None]
    sizes = [r for r in result["records"] if r.get("case") == "all_reduce"]
    parts = [(f, x) for f, x in ((_draw_sizes, sizes), (_draw_targets, judged)) if x]
    figure, axes = pyplot.subplots(
        1, max(1, len(parts)), figsize=(7.5 * max(1, len(parts)), 6), squeeze=False
    )
    for axis, (part, found) in zip(axes[0], parts, strict=False):
        part(axis, found)
    machine, ranks = result["machine"], result["ranks"]
    figure.suptitle(
        f"{machine['gpus_used']} {machine['gpu']}, {ranks} "
        f"rank{'s' if ranks > 1 else ''}: {machine['mpi'].partition(',')[0]}",
        fontsize=10,
    )
    figure.tight_layout()
    return figure


def _draw_sizes(axis: Any, records: list[dict[str, Any]]) -> None:
    """Draw the time of an all-reduce by its size, for each way."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        for name, seconds in record["seconds"].items():
            point = record["bytes"], statistics.median(seconds) * 1e6
            curves.setdefault(name, []).append(point)
    for name, points in curves.items():
        is_ours = name.startswith(("mpidist", "transport"))
        width = 2.5 if name == "mpidist" else 1.2
        style = "-" if is_ours else "--"
        axis.loglog(*zip(*sorted(points), strict=True), style, lw=width, label=name)
    axis.set_ylabel("microseconds per all-reduce", fontsize=9)
    axis.legend(fontsize=8, frameon=False)
    _clean(axis, "bytes", "both")
