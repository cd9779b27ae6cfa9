"""The scripts on the manual's pages, as they stand there."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SCRIPTS = {page.stem: page for page in PAGES if "\n```python\n" in page.read_text()}


@pytest.mark.parametrize("page", SCRIPTS)
def test_scripts_of_the_manual(comm, page, capsys):
    text = SCRIPTS[page].read_text()
    names = {}
    for script in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(script, page, "exec"), names)
    assert capsys.readouterr().out if comm.rank == 0 else True


def test_process_sets(comm, capsys):
    page = SCRIPTS["process_sets"].read_text()
    script = re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1]
    exec(compile(script, "process_sets", "exec"), {})
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
