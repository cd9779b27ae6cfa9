"""Names in docstrings and on pages are those of the code, wherever they stand."""

import ast
import builtins
import importlib
import keyword
import re
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.tools.cli import make_parser
from mpidist.util.settings import SETTINGS

ROOT = Path(mpidist.__file__).parents[1]
TREES = {p: ast.parse(p.read_text()) for p in sorted(ROOT.glob("mpidist/**/*.py"))}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
# These pages are lists of the names of others, and have tests of their own
LISTS = re.compile(r"docs/(tensorflow|coming_from/\w+)\.md")
# Names of other libraries and programs that stand elsewhere, and those of examples
_OTHERS = """
    Join MPI_Allreduce RandomState SLURM_JOB_END_TIME add_loss allow_int
    assert_consumed assert_existing_objects_matched backward cond count_up_to
    distributed_dataset donate_argnums expect_partial
    experimental_run_steps_on_iterator f_back first_step_seconds fully_shard
    functional_call get_future get_loss_reduction ignore_class init_device_mesh
    is_completed jax_enable_x64 jit_compile kernel_initializer kind loss_of lower
    max_norm measured_seconds mpidist_loss_train mpidist_scalar_step mpidist_step
    mpirun multiprocessing no_sync np num_parallel_calls ompi_info
    overlapped_seconds per_row_values python run_eagerly scan split_group srun
    state_dict step_histogram step_seconds steps_per_execution validation_split vmap
    w_i waiting_seconds
"""
OTHERS = set(_OTHERS.split())
SNAKE = re.compile(r"(?<![\w./-])[a-z]+(?:_[a-z0-9]+)+\b(?![./-]\w)")


def names_in(tree):
    """Yield the names that code defines or uses; not those in text."""
    for node in ast.walk(tree):
        for field in ("name", "arg", "id", "attr", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


def definitions():
    """Yield the names of modules, classes, functions, arguments and attributes."""
    for path, tree in TREES.items():
        yield from (path.stem, path.parent.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name
            elif isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.AnnAssign):  # a field of a class
                yield getattr(node.target, "id", None) or node.target.attr
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr


def docstrings(tree):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n".join(ast.get_docstring(node) or "" for node in nodes)


IN_CODE = {name for tree in TREES.values() for name in names_in(tree)} | OTHERS
DEFINED = {*definitions(), *dir(builtins), *dir(np), *keyword.kwlist, *OTHERS}
TEXTS = {path: docstrings(tree) for path, tree in TREES.items()}
TEXTS |= {path: path.read_text() for path in PAGES}


@pytest.mark.parametrize("path", TREES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_in_docstrings(path):
    text, here = TEXTS[path], set(names_in(TREES[path]))
    examples = set(re.findall(r"(?:^|\W)(\w+)(?: = |, \w+ = )", text))
    words = set(SNAKE.findall(text)) - examples - IN_CODE - DEFINED
    # A word in backquotes is of this module, or public, or defined somewhere
    single = set(re.findall(r"`([A-Za-z]\w*)(?:\(\))?`", text)) - here - DEFINED
    assert not words | single


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_on_pages(path):
    if LISTS.search(str(path)):
        return
    text = TEXTS[path]
    examples = {
        name for tree in map(ast.parse, sources(text)) for name in names_in(tree)
    }
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    words = {w for code in re.findall(r"`([^`]+)`", prose) for w in SNAKE.findall(code)}
    assert not words - examples - IN_CODE - DEFINED


def sources(text):
    """Yield the examples of a page, and the files of which it shows parts."""
    for source in re.findall(r"```python\n(.*?)```", text, re.S):
        try:
            ast.parse(source)
        except SyntaxError:  # a part of a file
            continue
        yield source
    for job in ROOT.glob("jobs/*.py"):
        yield job.read_text()


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_after_that_of_the_package(path):
    """`mpidist.torch.as_tensors`, `python -m mpidist doctor` and MPIDIST_LOG."""
    text = TEXTS[path]
    for name in re.findall(r"(?<![\w./-])mpidist((?:\.[A-Za-z]\w*)+)(?![\w/-])", text):
        require_name(name[1:].split("."))
    commands = make_parser()._subparsers._group_actions[0].choices
    said = set(re.findall(r"(?:-m mpidist|`mpidist) ([a-z]+)\b", text))
    threads = {"checkpoint"} if path.name == "architecture.md" else set()
    assert said <= {*commands, *threads}
    variables = set(re.findall(r"\bMPIDIST_[A-Z_]*[A-Z]\b", text))
    assert variables <= {setting.name for setting in SETTINGS}


def require_name(parts):
    if parts[0] in ("torch", "jax", "keras"):  # perhaps not installed
        assert set(parts) <= IN_CODE | DEFINED
        return
    found = mpidist
    for i, part in enumerate(parts):
        if hasattr(found, part):
            found = getattr(found, part)
        else:
            found = importlib.import_module(".".join(["mpidist", *parts[: i + 1]]))
