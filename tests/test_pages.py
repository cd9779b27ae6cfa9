"""The scripts on the manual's pages, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
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
