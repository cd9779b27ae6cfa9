"""What counted system calls say of jobs of any size, for `bench_metadata.py`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from input_files import ROW_BYTES
from system_calls import METADATA, Counts

BATCH = 32  # rows per rank and step
CLUSTERS = (1, 64, 4096)
RPC_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Job:
    """A job that reads; its global batch is 32 rows for each rank."""

    files: int = 3
    steps: int = 8  # per epoch
    epochs: int = 2
    ranks: int = 2

    def looked_into(self, rank: int) -> int:
        """Return the files that a rank looks into for all: every ranks-th."""
        return len(range(rank, self.files, self.ranks))

    def terms(self, looked_into: float) -> list[float]:
        """Return what a linear model of a rank's metadata operations is made of."""
        f, e, s, r = self.files, self.epochs, self.steps * self.epochs, self.ranks
        return [1, f, looked_into, e, s, r, f * e, f * s]


TERMS = ["1", "files", "files looked into", "epochs", "steps", "ranks"]
SIMPLE = 3  # of them often suffice
TERMS += [f"files x {name}" for name in ("epochs", "steps")]
# What is extrapolated to clusters
LARGE = Job(files=64, steps=1000, epochs=10)


@dataclasses.dataclass(frozen=True)
class Run:
    """What one traced job did: for each rank the counts, and its report."""

    reader: str
    layout: str
    job: Job
    counts: list[Counts]
    reports: list[dict[str, int]]

    @property
    def highest(self) -> int:
        """The metadata operations of the rank that has most."""
        return max(counts.metadata for counts in self.counts)

    @property
    def bytes_per_row(self) -> float:
        """The bytes that came from files for each row, headers included."""
        found = sum(counts.read_bytes for counts in self.counts)
        found += sum(report["resident_bytes"] for report in self.reports)
        return found / sum(report["rows"] for report in self.reports)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        ranks = [
            {**counts.as_dict(), **report}
            for counts, report in zip(self.counts, self.reports, strict=True)
        ]
        job = dataclasses.asdict(self.job)
        return {"reader": self.reader, "layout": self.layout, **job, "each_rank": ranks}


@dataclasses.dataclass(frozen=True)
class Model:
    """Least squares over the runs of one reader and layout.

    Args:
      metadata: `(2, kinds of METADATA, TERMS)`, of rank 0 and of another rank.
      data: `(2, 2)`, the read calls and the bytes of a rank, for each file and row.
      worst: how far it is off at most from what was counted, in metadata operations.
    """

    metadata: Any
    data: Any
    worst: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Model | None:
        """Fit the model; None if the runs are too few to tell the terms apart."""
        fits, worst = [], 0.0
        for rank in (0, 1):
            ranks = [min(rank, run.job.ranks - 1) for run in runs]
            terms = np.array(
                [r.job.terms(r.job.looked_into(k)) for r, k in zip(runs, ranks)]
            )
            if np.linalg.matrix_rank(terms) < len(TERMS):
                return None
            found = np.array([_by_kind(r.counts[k]) for r, k in zip(runs, ranks)])
            for count in (SIMPLE, len(TERMS)):
                fit = np.zeros((len(TERMS), len(METADATA)))
                fit[:count] = np.linalg.lstsq(terms[:, :count], found, rcond=None)[0]
                off = np.abs((terms @ fit - found).sum(axis=1)).max()
                if off <= 3:  # a rank may need no row of some file, and not open it
                    break
            fits.append(fit)
            worst = max(worst, off)
        metadata = np.array([fit.T for fit in fits]).round(6)
        return cls(metadata, _fit_data(runs), float(worst))

    def formula(self) -> str:
        """Return the metadata operations of a rank other than 0, as text."""
        factors = self.metadata[1].sum(axis=0).round(3)
        parts = [f"{c:g} x {t}" for c, t in zip(factors, TERMS, strict=True) if c]
        return " + ".join(parts).replace(" x 1", "")

    def predict(self, ranks: int) -> dict[str, float]:
        """Return what the large job costs Lustre on so many ranks."""
        job = dataclasses.replace(LARGE, ranks=ranks)
        mine = job.looked_into(0)
        # The others look into the rest
        theirs = (job.files - mine) / max(1, ranks - 1)
        first, other = (
            np.maximum(0, self.metadata[i] @ np.array(job.terms(looked_into)))
            for i, looked_into in enumerate((mine, theirs))
        )
        stat = METADATA.index("stat")
        rows = job.steps * job.epochs * BATCH
        calls, read = self.data @ np.array([job.files, rows])
        return {
            "ranks": ranks,
            "metadata_of_a_rank": float(max(first.sum(), other.sum())),
            "mds_requests": float(first.sum() + (ranks - 1) * other.sum()),
            "glimpses_per_stripe": float(first[stat] + (ranks - 1) * other[stat]),
            "read_calls": float(calls * ranks),
            "bytes_of_a_rank": float(read),
            "bytes": float(read * ranks),
            "least_ost_reads": float(-(-read // RPC_BYTES) * ranks),
        }


def _by_kind(counts: Counts) -> list[int]:
    """Return the metadata operations of each kind."""
    return [counts.calls[kind] for kind in METADATA]


def _fit_data(runs: Sequence[Run]) -> Any:
    """Return the read calls and bytes of a rank for each file, and for each row."""
    features, found = [], []
    for run in runs:
        for counts, report in zip(run.counts, run.reports, strict=True):
            read = counts.read_bytes + report["resident_bytes"]
            features.append([run.job.files, report["rows"]])
            found.append([counts.calls["read"], read])
    return np.linalg.lstsq(np.array(features), np.array(found), rcond=None)[0].T


def seen_by(name: str, runs: Sequence[Run]) -> dict[int, int]:
    """Return the metadata operations of a rank where only `name` differs from usual."""
    usual = runs[0].job
    return {
        getattr(run.job, name): run.highest
        for run in sorted(runs, key=lambda run: getattr(run.job, name))
        if dataclasses.replace(run.job, **{name: getattr(usual, name)}) == usual
    }


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what the runs of one reader and layout show."""
    model = Model.of(runs)
    seen = {name: seen_by(name, runs) for name in ("files", "steps", "epochs", "ranks")}
    varying = [n for n in ("steps", "epochs") if len(set(seen[n].values())) > 1]
    by_ranks = [seen["ranks"][n] for n in sorted(seen["ranks"])]
    if any(more > fewer for fewer, more in itertools.pairwise(by_ranks)):
        varying.append("ranks")  # fewer on more ranks is no harm
    modelled: dict[str, Any] = {}
    if model is not None:
        modelled = {
            "model": model.formula(),
            "model_is_off_by": round(model.worst, 6),
            "clusters": [model.predict(ranks) for ranks in CLUSTERS],
        }
    return {
        "reader": runs[0].reader,
        "layout": runs[0].layout,
        "usual_rank": runs[0].counts[-1].as_dict(),
        "bytes_per_row": runs[0].bytes_per_row,
        "metadata_by": seen,
        "metadata_depends_on": varying,
        **modelled,
    }


def lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that say what one reader does with one layout."""
    calls, seen = summary["usual_rank"], summary["metadata_by"]
    kinds = ", ".join(f"{kind} {calls[kind]}" for kind in METADATA if calls[kind])
    yield f"\n{summary['reader']}, {summary['layout']}"
    yield f"  metadata operations of a rank: {calls['metadata']} ({kinds})"
    for name, found in seen.items():
        yield f"    by {name:7} " + ", ".join(f"{n}: {k}" for n, k in found.items())
    varying = " and ".join(summary["metadata_depends_on"])
    constant = "do not grow with steps, epochs or ranks"
    yield f"    they {f'GROW with {varying}' if varying else constant}"
    yield (
        f"  data: {calls['read']} reads, {calls['map']} maps, "
        f"{summary['bytes_per_row']:.0f} bytes per row of {ROW_BYTES}"
    )
    if "model" in summary:
        off = summary["model_is_off_by"]
        yield f"  model: {summary['model']} (off by at most {off:g})"
    for c in summary.get("clusters", []):
        yield (
            f"  {c['ranks']:5} ranks: {c['metadata_of_a_rank']:.0f} of a rank; of all "
            f"{c['mds_requests']:.3g} MDS requests, {c['glimpses_per_stripe']:.3g} "
            f"glimpses per stripe, {c['bytes']:.3g} bytes in {c['read_calls']:.3g} "
            f"read calls, at least {c['least_ost_reads']:.3g} OST reads"
        )
