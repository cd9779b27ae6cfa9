"""Names in docstrings and on pages are those of the code, wherever they stand."""

import ast
import builtins
import contextlib
import functools
import importlib
import keyword
import re
from pathlib import Path

import numpy as np

import mpidist
from mpidist.tools.cli import make_parser
from mpidist.util.settings import SETTINGS

ROOT = Path(mpidist.__file__).parents[1]
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


def names_in(nodes):
    """Yield the names that code defines or uses; not those in text."""
    for node in nodes:
        for field in ("name", "arg", "id", "attr", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield from name.split(".")


def definitions(nodes):
    """Yield the names of classes, functions, arguments and attributes."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign):  # a field of a class
            yield getattr(node.target, "id", None) or node.target.attr
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@functools.cache
def names():
    """Parse all modules once, and return what the tests compare.

    The docstrings of each module, and the text of each page; the names that each module
    uses; those of all modules; those that any module defines.
    """
    texts, used = {}, {}
    defined = {*dir(builtins), *dir(np), *keyword.kwlist, *OTHERS}
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    for path in sorted(ROOT.glob("mpidist/**/*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        documented = [node for node in nodes if isinstance(node, kinds)]
        texts[path] = "\n".join(ast.get_docstring(n) or "" for n in documented)
        used[path] = set(names_in(nodes))
        defined |= {*definitions(nodes), path.stem, path.parent.name}
    texts |= {path: path.read_text() for path in PAGES}
    return texts, used, OTHERS.union(*used.values()), defined


def test_names_in_docstrings():
    texts, used, in_code, defined = names()
    for path, here in used.items():
        examples = set(re.findall(r"(?:^|\W)(\w+)(?: = |, \w+ = )", texts[path]))
        words = set(SNAKE.findall(texts[path])) - examples - in_code - defined
        # A word in backquotes is of this module, or public, or defined somewhere
        single = re.findall(r"`([A-Za-z]\w*)(?:\(\))?`", texts[path])
        assert not words | (set(single) - here - defined), path


def test_names_on_pages():
    texts, _, in_code, defined = names()
    jobs = [ast.parse(job.read_text()) for job in ROOT.glob("jobs/*.py")]
    in_jobs = {name for tree in jobs for name in names_in(ast.walk(tree))}
    for path in PAGES:
        if LISTS.search(str(path)):
            continue
        trees = map(ast.walk, examples_in(texts[path]))
        known = in_jobs | in_code | defined | set().union(*map(names_in, trees))
        prose = re.sub(r"```.*?```", "", texts[path], flags=re.S)
        codes = re.findall(r"`([^`]+)`", prose)
        assert not {w for c in codes for w in SNAKE.findall(c)} - known, path


def examples_in(text):
    """Yield the examples of a page; not the parts of files that it shows."""
    for source in re.findall(r"```python\n(.*?)```", text, re.S):
        with contextlib.suppress(SyntaxError):
            yield ast.parse(source)


def test_names_after_that_of_the_package():
    """`mpidist.torch.as_tensors`, `python -m mpidist doctor` and MPIDIST_LOG."""
    commands = {*make_parser()._subparsers._group_actions[0].choices}
    settings = {setting.name for setting in SETTINGS}
    public = re.compile(r"(?<![\w./-])mpidist((?:\.[A-Za-z]\w*)+)(?![\w/-])")
    for path, text in names()[0].items():
        for name in set(public.findall(text)):
            require_name(name[1:].split("."))
        said = set(re.findall(r"(?:-m mpidist|`mpidist) ([a-z]+)\b", text))
        threads = {"checkpoint"} if path.name == "architecture.md" else set()
        assert said <= commands | threads, path
        assert set(re.findall(r"\bMPIDIST_[A-Z_]*[A-Z]\b", text)) <= settings, path


def require_name(parts):
    if parts[0] in ("torch", "jax", "keras"):  # perhaps not installed
        assert set(parts) <= set.union(*names()[2:])
        return
    found = mpidist
    for i, part in enumerate(parts):
        if hasattr(found, part):
            found = getattr(found, part)
        else:
            found = importlib.import_module(".".join(["mpidist", *parts[: i + 1]]))
