"""The structure: who imports whom, what is public, how long things are."""

from __future__ import annotations

import ast
import graphlib
import sys
from pathlib import Path

import pytest

import mpidist

ROOT = Path(mpidist.__file__).parent

# Each module imports only from layers above its own line
LAYERS = [
    [
        "_version",
        "atomic_files",
        "memory.buffers",
        "commands",
        "errors",
        "regular_files",
        "notices",
        "agreement.flight_files",
        "gpu.early",
        "gpu.memory",
        "gpu.runtime_facts",
        "memory.free_memory",
        "doctor.finding",
    ],
    ["checks", "nest", "switches", "slurm_variables", "hang_limit"],
    ["launch_check"],
    ["cluster_resolver"],
    [
        "options",
        "input_options",
        "value_context",
        "values",
        "sharding",
        "memory.storage",
        "mpi_settings",
        "gpu.devices",
        "gpu.trial",
        "doctor.workers",
        "doctor.report",
        "doctor.python_checks",
        "doctor.hdf5_checks",
        "doctor.node_checks",
        "doctor.launch_checks",
    ],
    ["doctor.supervisor", "doctor.file_systems", "doctor.gpu_checks"],
    ["doctor.locks"],
    ["doctor.path_checks"],
    ["doctor.judging"],
    ["arrays", "regrouping", "block_order", "data.ownership"],
    [
        "arithmetic",
        "packing",
        "agreement.calls",
        "agreement.turns",
        "agreement.places",
        "agreement.departures",
        "agreement.forks",
        "copy_streams",
    ],
    ["agreement.pending", "agreement.peers"],
    ["agreement.losses"],
    [
        "collectives.leaves",
        "uploads",
        "topology",
        "agreement.claims",
        "agreement.recorder",
        "agreement.waiting",
    ],
    ["agreement.board", "agreement.disagreement"],
    ["agreement.comparing"],
    ["agreement.agree"],
    ["memory.node_memory", "memory.boards", "memory.symmetric", "gpu.cuda_aware"],
    ["gpu.facts", "gpu.streams"],
    ["gpu.host_copies", "gpu.kernels", "gpu.small_copies"],
    ["gpu.ipc"],
    ["transports.base", "transports.mpi"],
    [
        "transports.ipc",
        "transports.nccl",
        "transports.ordered",
        "transports.shared",
        "transports.staging",
    ],
    ["transports.by_size", "transports.device", "transports.hierarchical"],
    ["transports.defaults", "transports.table_file", "transports.ways"],
    ["transports.device_transports"],
    ["transports"],
    ["collectives.options_of", "collectives.results", "collectives.bucketing"],
    ["collectives.gathering"],
    ["collectives.repeated", "collectives.sums"],
    [
        "collectives.collectives",
        "data.sources",
        "data.spec",
        "data.undistributed",
        "data.file_names",
        "data.parallel",
    ],
    [
        "data.hdf5.codec",
        "data.hdf5.copying",
        "data.hdf5.other_files",
        "data.hdf5.block_cache",
        "data.hdf5.memory",
    ],
    ["data.hdf5.unfinished", "data.hdf5.layout", "data.hdf5.chunks"],
    ["data.hdf5.virtual", "data.hdf5.shard"],
    ["data.hdf5.index"],
    ["data.hdf5.names"],
    ["data.hdf5.raw_file", "data.hdf5.parts"],
    ["data.hdf5.columns", "data.hdf5.open_files"],
    ["data.hdf5.rows"],
    ["cross_device_ops"],
    ["channel"],
    ["replica_group", "reductions"],
    ["banner", "gradient_buckets", "doctor.speed", "doctor.job"],
    ["doctor.examination"],
    ["doctor.command"],
    ["data.pipeline", "data.distributed.optional", "data.tables"],
    ["data.reading"],
    ["data.ordering", "data.batching", "data.stream"],
    ["data.sequential", "data.caching", "data.policies"],
    ["data.steps", "data.state", "data.distributed.node_cache"],
    ["data.local_iterator"],
    ["data.dataset", "context"],
    ["data.distributed.index_sharing", "data.distributed.shared_caches"],
    ["updates", "data.distributed.feed", "audit"],
    ["variables", "multi_step"],
    [
        "data.distributed.kinds",
        "data.distributed.ahead",
        "data.distributed.fetching",
        "data.distributed.summary",
    ],
    ["data.distributed.iterator", "data.plan.dry_rows", "data.plan.parts"],
    ["data.plan.shares", "data.plan.notes"],
    ["data.plan.estimates", "data.plan.text"],
    ["data.plan.reads"],
    ["data.plan.input_plan"],
    ["data.distributed.datasets"],
    ["data.distributed.iterator_v1"],
    ["extended"],
    ["strategy"],
    ["strategy_v1", "hdf5_writer"],
    ["mirrored_strategy", "checkpoint.names", "checkpoint.dtypes"],
    [
        "checkpoint.tree",
        "checkpoint.header",
        "checkpoint.image",
        "checkpoint.files",
        "checkpoint.job_locks",
        "checkpoint.division",
        "checkpoint.generators",
        "checkpoint.status",
    ],
    ["checkpoint.layout", "checkpoint.reading", "checkpoint.objects"],
    [
        "checkpoint.changing",
        "checkpoint.collecting",
        "checkpoint.folder",
        "checkpoint.loading",
    ],
    ["checkpoint.matching"],
    ["checkpoint.assembling", "checkpoint.saving", "checkpoint.restoring"],
    ["checkpoint.saver"],
    ["checkpoint.checkpoint", "flight_diff", "launch", "watch"],
    ["checkpoint.manager"],
    ["preemption", "elastic"],
    ["tune"],
    ["__init__", "__main__"],
]
# Packages that only have a docstring
EMPTY = [
    "agreement",
    "checkpoint",
    "collectives",
    "data",
    "data.distributed",
    "data.hdf5",
    "data.plan",
    "doctor",
    "gpu",
    "memory",
]
PACKAGES = ["mpidist", *(f"mpidist.{name}" for name in EMPTY)]
OUTSIDE = {
    "mpi4py": {
        "banner",
        "launch_check",
        "topology",
        "doctor.examination",
        "doctor.job",
        "doctor.speed",
        "gpu.cuda_aware",
        "gpu.facts",
        "gpu.trial",
        "agreement.departures",
        "agreement.forks",
        "agreement.recorder",
        "agreement.waiting",
        "agreement.board",
        "agreement.losses",
        "agreement.peers",
        "agreement.pending",
        "elastic",
        "agreement.comparing",
        "agreement.agree",
        "memory.node_memory",
        "transports.mpi",
        "transports.hierarchical",
        "transports.ordered",
        "memory.boards",
        "memory.symmetric",
        "channel",
        "gradient_buckets",
        "replica_group",
        "tune",
        "extended",
        "mirrored_strategy",
        "launch",
        "watch",
    },
    "cupy": {
        "arrays",
        "copy_streams",
        "gpu.devices",
        "gpu.facts",
        "gpu.host_copies",
        "gpu.ipc",
        "gpu.kernels",
        "gpu.memory",
        "gpu.runtime_facts",
        "gpu.small_copies",
        "gpu.streams",
        "transports.nccl",
    },
    "h5py": {
        "data.hdf5.rows",
        "data.hdf5.chunks",
        "data.hdf5.columns",
        "data.hdf5.index",
        "data.hdf5.layout",
        "data.hdf5.names",
        "data.hdf5.other_files",
        "data.hdf5.shard",
        "data.hdf5.virtual",
        "data.hdf5.open_files",
        "checkpoint.dtypes",
        "checkpoint.layout",
        "checkpoint.reading",
        "doctor.file_systems",
        "doctor.hdf5_checks",
        "doctor.locks",
    },
    "deflate": {"data.hdf5.codec", "checkpoint.collecting", "checkpoint.files"},
    "optree": {"nest"},
}


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        yield ".".join(parts), ast.parse(path.read_text())


MODULES = dict(modules())


def imports(tree):
    """Yield the modules imported at run time, `mpidist.` left out for our own."""
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module in PACKAGES:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def own(name):
    short = name.removeprefix("mpidist.")
    return short if name.startswith("mpidist.") and short in MODULES else None


def test_every_module_has_a_layer():
    placed = [name for layer in LAYERS for name in layer]
    assert sorted(placed) == sorted(name for name in MODULES if name not in EMPTY)


@pytest.mark.parametrize("name", [n for n in MODULES if n not in EMPTY])
def test_imports_go_up_only(name):
    level = {n: i for i, layer in enumerate(LAYERS) for n in layer}
    for imported in filter(None, map(own, imports(MODULES[name]))):
        assert level[imported] < level[name], f"{name} -> {imported}"


@pytest.mark.parametrize("library", OUTSIDE)
def test_only_some_modules_import(library):
    users = {
        name
        for name, tree in MODULES.items()
        if any(i.partition(".")[0] == library for i in imports(tree))
    }
    assert users <= OUTSIDE[library]


def test_the_public_names_are_the_namespace():
    public = {
        name
        for name, value in vars(mpidist).items()
        if not name.startswith("_") and not isinstance(value, type(sys))
    } - {"annotations"}
    assert public | {"__version__"} == set(mpidist.__all__)
    assert len(mpidist.__all__) == len(set(mpidist.__all__))


def test_public_names_have_docstrings():
    for name in mpidist.__all__:
        assert name == "__version__" or getattr(mpidist, name).__doc__, name


def test_modules_and_functions_are_short():
    for name, tree in MODULES.items():
        lines = tree.body[-1].end_lineno
        assert lines <= 500, f"{name}: {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.body[0].lineno
                assert length <= 60, f"{name}.{node.name}: {length} lines"


def test_folders_do_not_import_each_other_in_a_circle():
    """A module at the top may import any folder; folders know of few others."""
    above = {}
    for name, tree in MODULES.items():
        folder = name.partition(".")[0]
        if (ROOT / folder).is_dir():
            used = {n.partition(".")[0] for n in filter(None, map(own, imports(tree)))}
            used = {n for n in used if (ROOT / n).is_dir()} - {folder}
            above.setdefault(folder, set()).update(used)
    assert tuple(graphlib.TopologicalSorter(above).static_order())
