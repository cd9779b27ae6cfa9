"""CONTRIBUTING.md: its examples are applied to a copy, and run."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import launching
import pytest

import mpidist

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PARTS = dict(re.findall(r"^## (Adding a.*?)\n(.*?)(?=^## )", PAGE, re.M | re.S))
# Above the copy's name in a diff are the lines that are looked for, not their numbers
HUNK = re.compile(r"^@@.*?@@\n(.*?)(?=^@@|^--- |\Z)", re.M | re.S)


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def write_files(text, folder):
    for block in blocks(text, "python"):
        name, _, rest = block.partition("\n")
        path = folder / name.removeprefix("# ")
        assert not path.exists(), f"{path} is there already"
        path.write_text(rest)


def apply(diff, folder):
    """Apply a diff; what it changes may stand at any line, but only once."""
    for part in re.split(r"^(?=--- )", diff, flags=re.M)[1:]:
        path = folder / re.search(r"^\+\+\+ b/(.*)$", part, re.M)[1]
        text = path.read_text()
        for hunk in HUNK.findall(part):
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(old) == 1, f"CONTRIBUTING.md: {path.name} lacks {old!r}"
            text = text.replace(old, new)
        path.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("title", PARTS)
def test_a_worked_example_passes_its_tests(mpirun, tmp_path, title):
    for folder in (Path(mpidist.__file__).parent, ROOT / "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "*.h5")
        shutil.copytree(folder, tmp_path / folder.name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    write_files(PARTS[title], tmp_path)
    for diff in blocks(PARTS[title], "diff"):
        apply(diff, tmp_path)
    (line,) = blocks(PARTS[title], "console")
    words = shlex.split(line.removeprefix("$ "))
    ranks, arguments = 1, words[1:]
    if words[0] == "mpirun":
        ranks, arguments = int(words[2]), words[4:]
    # The copy's folder comes first on the path, before an installed mpidist
    program = (
        "import os, sys\n"
        "os.chdir(sys.argv[1]); sys.path.insert(0, sys.argv[1])\n"
        "import mpidist, pytest\n"
        "assert mpidist.__file__.startswith(sys.argv[1]), mpidist.__file__\n"
        "sys.exit(pytest.main(['-q', *sys.argv[2:]]))\n"
    )
    done = mpirun(ranks, program, str(tmp_path), *arguments, PYTHONPATH=str(tmp_path))
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    for command in (["check"], ["format", "--check"]):
        done = launching.run([sys.executable, "-m", "ruff", *command, str(tmp_path)])
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_there_are_the_examples_that_the_page_promises():
    assert list(PARTS) == [
        "Adding a collective",
        "Adding a transport",
        "Adding a reduction",
        "Adding a data source",
        "Adding a doctor's check",
    ]


def test_the_commands_of_the_set_up_exist():
    for name in re.findall(r"tests/[\w/]+\.py|\.ci/\w+|docs/\w+(?:\.md)?", PAGE):
        is_example = f"# {name}\n" in PAGE
        in_sdist = not name.startswith(".ci") or (ROOT / ".ci").exists()
        assert is_example or not in_sdist or (ROOT / name).exists(), name
