"""The structure: who imports whom, what is public, how long things are."""

import ast
import graphlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import mpidist

ROOT = Path(mpidist.__file__).parent

# Each room imports only from those before it
ROOMS = [
    "errors",
    "util",
    "options",
    "reductions",
    "values",
    "context",
    "launch",
    "device",
    "comm",
    "monitor",
    "hdf5",
    "data",
    "statistics",
    "strategy",
    "checkpoint",
    "resilience",
    "torch",
    "tools",
    "jax",
    "keras",
]
# The same inside two of them: of a room's modules, those that stand here
INSIDE = {
    "comm": [
        "consensus",
        "topology",
        "device_info",
        "shared_memory",
        "transports",
        "collectives",
        "cross_device_ops",
        "replica_group",
        "gradient_buckets",
        "banner",
    ],
    "data": [
        "sharding",
        "shuffling",
        "sources",
        "map_dataset",
        "iter_dataset",
        "dataset",
        "distributed",
    ],
}
TOP = {*ROOMS, "__init__", "__main__", "_version"}
# Which rooms import a library, or the one module that does
OUTSIDE = {
    "mpi4py": {
        "util.forks",
        "launch",
        "device.probe",
        "comm",
        "monitor",
        "strategy",
        "resilience",
        "torch.messages",
        "torch.process_group",
        "tools",
        "jax",
    },
    "cupy": {
        "device",
        "comm.device_info",
        "comm.transports.ipc",
        "comm.transports.nccl",
    },
    "h5py": {"hdf5", "checkpoint", "tools.doctor"},
    "deflate": {"hdf5.chunks", "checkpoint", "device.arrays"},
    "optree": {"util.nest"},
    "torch": {"torch", "keras.on_torch"},
    "jax": {"jax", "keras.on_jax"},
    "keras": {"keras"},
}


class Module(NamedTuple):
    """A module: its tree, all nodes of that, and what it imports at run time."""

    tree: ast.Module
    nodes: list[ast.AST]
    imports: set[str]


PATHS = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*.py"))]
NAMES = {
    ".".join(path.with_suffix("").parts).removesuffix(".__init__"): ROOT / path
    for path in PATHS
}
FOLDERS = {n for n, path in NAMES.items() if (ROOT / n.replace(".", "/")).is_dir()}


@pytest.fixture(scope="module")
def modules():
    """The modules by their names, parsed once for all tests, and then dropped."""
    found = {}
    for name, path in NAMES.items():
        nodes = list(ast.walk(tree := ast.parse(path.read_text())))
        found[name] = Module(tree, nodes, set(imports(nodes)))
    return found


def imports(nodes):
    """Yield the modules imported at run time, `mpidist.` left out for our own."""
    typing_only = {
        node
        for block in nodes
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in nodes:
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "mpidist" or own(node.module) in FOLDERS:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def own(name):
    short = name.removeprefix("mpidist.")
    return short if name.startswith("mpidist.") and short in NAMES else None


@pytest.fixture(scope="module")
def own_imports(modules):
    """Which modules of ours each of them imports."""
    return {
        name: {i for i in map(own, module.imports) if i}
        for name, module in modules.items()
        if name not in ("__init__", "__main__")
    }


def is_in(name, rooms):
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


@pytest.mark.parametrize("framework", ["jax", "torch", "keras"])
def test_mpidist_imports_no_framework(own_imports, framework):
    rooms = [framework, "keras"]  # which computes with one of the others
    for name, imported in own_imports.items():
        if not is_in(name, rooms):
            assert not [i for i in imported if is_in(i, [framework])], name


def test_the_top_has_no_other_entries():
    assert {name.partition(".")[0] for name in NAMES} == TOP


def test_imports_go_up_only(own_imports):
    for name, imported in own_imports.items():
        room, _, rest = name.partition(".")
        inside = INSIDE.get(room, [])
        for other, _, other_rest in (i.partition(".") for i in imported - {"_version"}):
            assert ROOMS.index(other) <= ROOMS.index(room), (name, other)
            inner, other_inner = rest.partition(".")[0], other_rest.partition(".")[0]
            if other == room and inner in inside and other_inner in inside:
                assert inside.index(other_inner) <= inside.index(inner), name


def test_the_manual_lists_the_rooms_in_this_order():
    table = (ROOT.parent / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", table, flags=re.MULTILINE)
    assert [room for row in rows for room in re.findall(r"`(\w+)`", row)] == ROOMS


def test_the_manual_names_what_exists(modules):
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    names = {
        f"{getattr(outer, 'name', name.rpartition('.')[2])}.{node.name}"
        for name, module in modules.items()
        for outer in module.nodes
        if isinstance(outer, ast.Module | ast.ClassDef)
        for node in outer.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    known = names | {name.partition(".")[2] for name in names}
    for path in re.findall(r"`([\w/]+\.py)`", text):
        assert (ROOT / path.removeprefix("mpidist/")).is_file(), path
    for name in re.findall(r"`([A-Za-z_]+\.[a-z_]+|[A-Z]\w+[a-z]\w*)`", text):
        if not name.startswith(("mpidist.", "MPI")):
            assert name in known, name


def test_no_modules_import_each_other_in_a_circle(own_imports):
    assert tuple(graphlib.TopologicalSorter(own_imports).static_order())


@pytest.mark.parametrize("library", OUTSIDE)
def test_only_some_modules_import(modules, library):
    for name, module in modules.items():
        if not is_in(name, OUTSIDE[library]):
            assert not [i for i in module.imports if is_in(i, [library])], name


def test_the_public_names_are_the_namespace():
    values = {name: getattr(mpidist, name) for name in dir(mpidist)}
    public = {
        name
        for name, value in values.items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    }
    assert public | {"__version__"} == set(mpidist.__all__)
    assert len(mpidist.__all__) == len(set(mpidist.__all__))


def test_public_names_have_docstrings():
    for name in mpidist.__all__:
        assert name == "__version__" or getattr(mpidist, name).__doc__, name


def test_modules_and_functions_are_short(modules):
    for name, module in modules.items():
        lines = module.tree.body[-1].end_lineno
        assert lines <= 1000, f"{name}: {lines} lines"
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.body[0].lineno
                assert length <= 60, f"{name}.{node.name}: {length} lines"


def test_no_assertion_decides_anything(modules):
    """`python -O` removes them: they only state what cannot be otherwise."""
    harmless = {"isinstance", "len", "_get_ident"}
    for name, module in modules.items():
        for node in module.nodes:
            if isinstance(node, ast.Assert):
                calls = {
                    ast.unparse(call.func)
                    for call in ast.walk(node.test)
                    if isinstance(call, ast.Call)
                }
                assert calls <= harmless, f"{name}: {ast.unparse(node)}"


def test_nothing_draws_from_a_global_generator(modules):
    """Programs that seed alike on all ranks would differ after it."""
    made = {"Random", "SystemRandom", "Generator", "RandomState", "SeedSequence"}
    made |= {"default_rng", "BitGenerator", "PCG64", "Philox"}
    for name, module in modules.items():
        for node in module.nodes:
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                is_python = owner == "random" and "random" in module.imports
                if is_python or owner in ("np.random", "numpy.random"):
                    assert node.attr in made, f"{name}: {ast.unparse(node)}"
            if isinstance(node, ast.ImportFrom) and node.module == "random":
                assert {alias.name for alias in node.names} <= made, name


def test_messages_show_values_and_not_their_own_source(modules):
    """A text with `{name}` in it lacks an f; ruff's RUF027 finds few of these."""
    code = re.compile(r"\{[a-z_]\w*[^{}\s:\"]*[\w)\]]*(![rs])?\}|\{\w+\(")
    for name, module in modules.items():
        formatted = {
            id(part)
            for node in module.nodes
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
        }
        docstrings = {
            id(node.body[0].value)
            for node in module.nodes
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        }
        texts = [
            node.value
            for node in module.nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in formatted | docstrings
        ]
        assert [text for text in texts if code.search(text)] == [], name
