"""Commands on damaged and foreign files: an error that can be read, or success."""

import copy
import gzip
import json
import os
import random

import pytest

from mpidist.comm.transports.tuning import METHODS, Layout, write_table
from mpidist.tools.cli import main

JOB = """
import os
import numpy as np
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
rows = mpidist.Dataset.range(32).batch(4)
for batch in strategy.experimental_distribute_dataset(rows):
    strategy.run(lambda x: None, args=(batch,))
    strategy.reduce("SUM", np.ones(9))
strategy.extended.timeline.stop()
strategy.barrier()
os._exit(0)  # the dumps stay
"""
# "" stands for no value
VALUES = (
    *(None, True, -1, 0, 1.5, 10**30, 10**400, 1e-320, float("inf"), float("nan")),
    *("", "x", "\x1b[31mred\n", "\u202e", [], [[]], {}, {"": 0}),
)
COUNT = 150  # mutations of each kind of file


def places(value, path=()):
    """Yield the path of each value in a nest of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from places(item, (*path, key))


def change(value, rng):
    """Return a nest of JSON with another value, or without one, at some place."""
    *path, last = rng.choice([path for path in places(value) if path] or [(None,)])
    value = copy.deepcopy(value)
    inner = value
    for key in path:
        inner = inner[key]
    new = rng.choice(VALUES)
    if last is None:
        return new
    if new == "":
        del inner[last]
    elif isinstance(inner, dict) and rng.random() < 0.2:
        inner["\x1b[31m"] = inner.pop(last)
    else:
        inner[last] = new
    return value


def change_bytes(data, rng):
    """Return bytes of which some are missing, or others."""
    at = rng.randrange(len(data) + 1)
    new = rng.randbytes(rng.choice([0, 1, 8, 100]))
    return data[:at] + new + data[at + rng.choice([0, 1, 8, 100, len(data)]) :]


def change_text(data, rng):
    """Return lines of JSON with another value at some place, or other bytes."""
    if rng.random() < 0.2:
        return change_bytes(data, rng)
    lines = data.decode().splitlines(keepends=True)
    at = rng.randrange(len(lines))
    body = lines[at].rstrip(",\n")
    if body not in ("[", "]"):
        deep = rng.random() < 0.05
        new = "[" * 100_000 if deep else json.dumps(change(json.loads(body), rng))
        lines[at] = new + lines[at][len(body) :]
    return "".join(lines).encode()


def mutate(path, data, rng):
    """Put something else into the place of a file."""
    kind = rng.random()
    if kind < 0.02:
        os.mkfifo(path)
    elif kind < 0.04:
        path.mkdir()
    elif kind < 0.06:
        path.symlink_to(path)
    elif path.suffix == ".gz" and kind < 0.8:
        path.write_bytes(gzip.compress(change_text(gzip.decompress(data), rng), 1))
    elif path.suffix in (".gz", ".ring"):
        path.write_bytes(change_bytes(data, rng))
    else:
        path.write_bytes(change_text(data, rng))


COMMANDS = {
    "status-*.json": "report {0} -o {1}/a.html",
    "timeline-*.gz": "report {0} -o {1}/a.html --trace {1}/a.json",
    "channel-*.jsonl": "diff {0}",
    "channel-*.ring": "diff {0}",
    "tuning.json": "config MPIDIST_TRANSPORTS={0}/tuning.json",
}


def test_damaged_files(mpirun, tmp_path, capsys, monkeypatch):
    """Those of a job, and a tuning file."""
    timeline, dumps = tmp_path / "timeline", tmp_path / "dumps"
    folders = {"MPIDIST_TIMELINE": str(timeline), "MPIDIST_DUMPS": str(dumps)}
    mpirun(2, JOB, fails=None, **folders)  # to some mpiruns such an end is a failure
    table = {method: [(0, "mpi"), (1 << 20, "ring")] for method in METHODS}
    write_table(
        tuning := dumps / "tuning.json", Layout("MPICH", (2,), "CPU"), table, {}
    )
    tuning.write_text(json.dumps(json.loads(tuning.read_bytes())))  # in a line
    assert len([*tmp_path.rglob("*-*")]) == 8, "two of four kinds"
    monkeypatch.setenv("MPIDIST_ALLOW_SINGLETON", "1")  # else only rank 0 would print
    for pattern, command in COMMANDS.items():
        originals = {p: p.read_bytes() for p in sorted(tmp_path.rglob(pattern))}
        assert originals
        statuses = set()
        for seed in range(COUNT):
            rng = random.Random(seed)
            path = rng.choice([*originals])
            path.unlink()
            mutate(path, originals[path], rng)
            words = command.format(path.parent, tmp_path).split()
            statuses.add(status := main(words))
            shown = "".join(capsys.readouterr())
            assert all(map(str.isprintable, shown.splitlines())), (seed, shown)
            is_diff = words[0] == "diff"  # which is 1 where calls differ
            is_said = status == 0 or (is_diff and status == 1) or "error" in shown
            assert is_said, (seed, shown)
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(originals[path])
        assert statuses <= {0, 1, 2}
        assert 0 in statuses or is_diff  # whatever was changed, some are whole


def test_outputs_that_would_overwrite_each_other(tmp_path, capsys):
    timeline = tmp_path / "timeline"
    timeline.mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "page")
    for words in (
        ["-o", tmp_path / "page", "--trace", tmp_path / "page"],
        ["-o", tmp_path / "page", "--trace", link],
        ["-o", timeline / "status-00000.json"],
        ["-o", tmp_path / "page", "--trace", timeline / "timeline-00001.json.gz"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["report", str(timeline), *map(str, words)])
        assert ended.value.code == 2
        assert "error" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "plan x.h5 --batch 4 --ranks 100000000",
        f"plan x.h5 --batch {10**30} --ranks 2",
        "plan x.h5 --ranks 2 --batch " + 5000 * "1",
        f"plan x.h5 --batch 4 --ranks 2 --shuffle --window-chunks {10**30}",
        f"plan x.h5 --batch 4 --ranks 2 --ranks-per-node {10**30}",
        f"run -n {10**12} x.py",
        f"tune --repetitions {10**12}",
        f"tune --largest-bytes {10**18}",
        "doctor --seconds nan",
        "doctor --seconds inf",
        "doctor --seconds 0",
        "doctor --seconds soon",
        "doctor --seconds",
        "doctor --paths",
        "doctor extra",
    ],
)
def test_arguments_that_no_job_could_use(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err
