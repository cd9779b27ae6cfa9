"""The scripts on the manual's pages, as they stand there, and its pictures."""

import difflib
import importlib.util
import json
import re
import struct
from pathlib import Path

import chromium
import h5py
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SCRIPTS = {page.stem: page for page in PAGES if "\n```python\n" in page.read_text()}
del SCRIPTS["how_do_i"]  # see test_how_do_i.py
# Scripts that fail, and the last lines that they write
FAILURES = re.findall(
    r"^```py\n# (\w+\.py)\n(.*?)^```\n+"
    r"```\{code-block\} none\n:class: stderr\n(.*?)^```$",
    (ROOT / "docs/failures.md").read_text(),
    re.M | re.S,
)


# What pages import that need not be installed
OPTIONAL = {"jax", "prometheus_client", "tensorboardX", "torch.utils.tensorboard"}
ELSEWHERE = "import torch", "import keras"  # see tests/torch and tests/keras


def run_page(path, names):
    """Run the scripts of a page one after the other, but those that lack a package."""
    scripts = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.M | re.S)
    for script in scripts:
        if any(line in script for line in ELSEWHERE):
            continue
        if importlib.util.find_spec("tensorboard") is None:  # of the same class
            script = script.replace("torch.utils.tensorboard", "tensorboardX")
        imported = re.findall(r"^(?:import|from) ([\w.]+)", script, re.M)
        packages = {name: name.partition(".")[0] for name in imported}
        needed = [packages[n] for n in imported if {n, packages[n]} & OPTIONAL]
        if None not in map(importlib.util.find_spec, needed):
            exec(compile(script, path, "exec"), names)


@pytest.mark.parametrize("page", SCRIPTS)
def test_scripts_of_the_manual(comm, page, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)  # for those that write files
    run_page(SCRIPTS[page], {})


def test_reading_and_writing_rows(comm, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    names = {}
    run_page(SCRIPTS["input"], names)
    assert len(names["rest"]) == 2  # of the three steps of an epoch
    # Without locks, as mpidist, which may have it open
    with h5py.File("errors.h5", locking=False) as file:
        x = file["x"][:]
        assert file["error"].shape == (10,)
    assert sorted(map(tuple, x)) == sorted(map(tuple, names["x"]))
    with h5py.File("predicted.h5") as file:
        np.testing.assert_allclose(file["y"][:], x @ names["w"], rtol=1e-12)


def test_statistics_for_others(comm, mpi_tmp_path, monkeypatch):
    """Read back by other means than they were written by."""
    parser = pytest.importorskip("prometheus_client.parser")
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    monkeypatch.chdir(mpi_tmp_path)
    names = {}
    run_page(SCRIPTS["monitoring"], names)
    if comm.rank:
        return
    text, parts = Path("job.prom").read_text(), names["found"]["parts"]
    (family,) = parser.text_string_to_metric_families(text)
    assert {s.labels["part"]: s.value for s in family.samples} == parts
    (path,) = Path("runs/1").iterdir()
    data, events = path.read_bytes(), []
    while data:  # records of TensorFlow
        (size,) = struct.unpack("<Q", data[:8])
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert events[0].file_version == "brain.Event:2"
    scalars = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert scalars == [
        (8, f"seconds/{part}", pytest.approx(seconds))
        for part, seconds in parts.items()
    ]


def test_going_on(comm, mpi_tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(mpi_tmp_path)
    run_page(SCRIPTS["checkpoints"], {})
    out = capsys.readouterr().out
    assert out == (f"8 10 {float(sum(range(64)))}\n" if comm.rank == 0 else "")


def test_fitting(comm, capsys):
    run_page(SCRIPTS["getting_started"], {})
    out = capsys.readouterr().out
    expected = "w = [1.001 1.997 2.999], loss = 0.000006\n"
    assert out == (expected if comm.rank == 0 else "")


def test_there_are_failures_on_the_page():
    names = [name for name, *_ in FAILURES]
    assert names == ["diverge.py", "shapes.py", "replica.py", "file.py", "hang.py"]


@pytest.mark.parametrize(("name", "script", "expected"), FAILURES)
def test_failures_look_as_the_manual_says(
    mpirun, tmp_path, monkeypatch, name, script, expected
):
    path = tmp_path / name
    path.write_text(f"# {name}\n{script}")
    monkeypatch.chdir(tmp_path)
    ended = mpirun(2, str(path), fails=True, MPIDIST_HANG_SECONDS="6")
    stderr = anyones(ended.stderr.replace(f"{tmp_path}/", ""))
    frame = r'  File "(.*)", line (\d+), in .*\n    (.*)\n'
    for file, line, code in re.findall(frame, expected):  # of the rank that prints
        assert file == name
        assert path.read_text().splitlines()[int(line) - 1].strip() == code
    lines = anyones(re.sub(frame, "", expected)).replace("...\n", "").splitlines()
    for line in lines:
        assert line.startswith("Abort(") or f"{line}\n" in stderr  # MPICH's own line


def anyones(text):
    """Return a text without what differs from run to run: who prints, and when."""
    text = re.sub(r"^\[(\w+) rank \d \S+\]", r"[\1]", text, flags=re.M)
    text = re.sub(r"mpidist: rank \d of 2 failed", "mpidist: a rank failed", text)
    return re.sub(r"\d+\.\d s\b", "SECONDS", text)


def test_the_readmes_failure_is_the_manuals():
    readme = " ".join((ROOT / "README.md").read_text().split())
    (expected,) = re.findall("^.*DivergenceError.*", FAILURES[0][2], re.M)
    assert expected.replace("diverge.py", "train.py") in readme


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert lines.count("```sh") == 2  # see .ci/run


def speed(name, case, against, nodes=None):
    """Return how many times faster mpidist was, by a benchmark's results."""
    result = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    if nodes is not None:
        of = [(x["nodes"], x["ranks_per_node"]) for x in result["layouts"]]
        result = result["layouts"][of.index((nodes, 1))]
    for found in result["comparisons"]:
        if (found["case"], found["against"]) == (case, against):
            is_rate = found["unit"].endswith("/s")
            return found["ratio"] if is_rate else 1 / found["ratio"]
    raise KeyError(case)


def test_the_readmes_speeds_are_those_that_were_measured():
    ddp, mlp = "torch DDP (gloo)", "MLP of 10 M parameters"
    large = "all_reduce, 16,777,216 bytes"
    loader = "torch DataLoader, a batch per call"
    measured = [
        speed("collectives-mpich-2ranks", "all_reduce, 67,108,864 bytes", "raw MPI"),
        speed("collectives-mpich-2ranks", "all_reduce, 8 bytes", "raw MPI"),
        speed("network-mpich", large, "torch gloo", 2),
        speed("network-mpich", large, "raw MPI", 2),
        speed("network-tensorflow", large, "TF MultiWorkerMirrored", 2),
        speed("step-mpich-2ranks", "training step, 2 ranks", "by hand"),
        speed("frameworks-mpich", mlp, ddp),
        speed("frameworks-wire-mpich", mlp, ddp),
        speed("frameworks-wire-mpich", f"{mlp}, mpidist, bfloat16", ddp),
        speed("input-2ranks", "contiguous, shuffle", loader),
    ]
    table = (ROOT / "README.md").read_text().partition("## Speed")[2]
    said = []
    for line in table.splitlines():
        if line.startswith("|"):
            said += re.findall(
                r"\d+(?:\.\d+)?", line.split("|")[3].replace("bfloat16", "")
            )
    for number, text in zip(measured, said, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(number - float(text)) <= (0.006 if digits else 0.5), text


PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


@pytest.mark.slow
@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_no_text_of_a_picture_overlaps_another(path, tmp_path):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    page = f'<html><body style="margin:0">{path.read_text()}</body></html>'
    found = chromium.look(page, tmp_path, 500)
    assert found["wrong"] == []
    assert found["texts"] > 10


def test_pictures_have_a_text_and_are_shown():
    shown = {}
    for page in PAGES:
        for text, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text()):
            shown.setdefault(path, []).append(text)
    assert all(text for texts in shown.values() for text in texts)
    assert {f"pictures/{path.name}" for path in PICTURES} <= set(shown)


def test_process_sets(comm, capsys):
    run_page(SCRIPTS["process_sets"], {})
    out = capsys.readouterr().out
    sums = [float(sum(range(color, comm.size, 2))) for color in (0, 1)][: comm.size]
    if comm.rank == 0:
        assert out.endswith(f"sums of the halves: {sums}\n")


def test_the_differences_of_jobs_are_those_of_the_files():
    page = (ROOT / "docs/frameworks.md").read_text()
    blocks = re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        names = [line.split()[1] for line in block.splitlines()[:2]]
        single, many = ((ROOT / name).read_text().splitlines() for name in names)
        lines = difflib.unified_diff(single, many, *names, lineterm="", n=1)
        assert block.splitlines() == list(lines), f"the page lacks what {names} have"
