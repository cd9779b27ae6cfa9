"""Checks of one process, and checks of the facts of all ranks.

A check of one process is a function that returns a Row, or a list of them; the rows of
all ranks are merged. A check of all ranks is a function from `RankFacts` by rank to
rows. Neither communicates. LOCAL_CHECKS and JOB_CHECKS have them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mpidist._version import __version__
from mpidist.errors import LaunchError
from mpidist.launch.launchers import HYDRA, differs_by_rank, find_launcher
from mpidist.tools.doctor.paths import LOCKING
from mpidist.tools.doctor.rows import (
    FAIL,
    OK,
    WARN,
    Row,
    by_rank,
    describe_error,
    examine,
    merge,
    name_ranks,
)
from mpidist.util.available_memory import (
    as_text,
    available_cores,
    free_bytes,
    physical_core,
)
from mpidist.util.representation import counted
from mpidist.util.settings import (
    ALLOW_SINGLETON,
    BANNER,
    LOG,
    PREFIX,
    SETTINGS,
    decimal,
    unknown_names,
)

NEEDED = ("numpy", "h5py", "mpi4py", "deflate", "optree")
_ONE_PYTHON = "start all ranks with one Python of one environment, on every node"
# Variables that change how ranks communicate, and should be equal on all ranks
_PREFIXES = ("FI_", "HDF5_", "I_MPI_", "MKL_", "MPICH_", PREFIX, "MPIR_CVAR_", "NCCL_",
             "OMPI_MCA_", "OMP_", "OPENBLAS_", "UCX_")  # fmt: skip
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_RC_THREAD_LEVEL", "PYTHONHASHSEED",
          "PYTHONOPTIMIZE", "PYTHONPATH")  # fmt: skip
_SHOWN_LETTERS = 60
_MAY_DIFFER = (BANNER.name, LOG.name)  # they change only the output of a rank
_LOCKING_VALUES = ("TRUE", "1", "FALSE", "0", "BEST_EFFORT")
# H5Z_FILTER_... of HDF5, and the most common registered filters
_FILTERS = {"gzip": 1, "shuffle": 2, "fletcher32": 3, "szip": 4, "scaleoffset": 6}
_FILTERS |= {"lzf": 32000, "blosc": 32001, "lz4": 32004, "bitshuffle": 32008}
_FILTERS |= {"zstd": 32015, "blosc2": 32026}
# Device files of NVIDIA's driver
_GPU_DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")
_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_SHARED_FOLDER = "/dev/shm"
# What MPICH, and Open MPI and its UCX, name there
_MPI_FILES = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "ucx_shm_posix_*")
_STARTING_SECONDS = 60.0  # a job may be making newer ones
# Shared memory that a rank's transports and the MPI library need, per rank
_LEAST_BYTES, _GOOD_BYTES = 16 << 20, 64 << 20
# The first that is set limits the threads of NumPy's linear algebra
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
_SHOWN_NODES = 8


def _check_python() -> list[Row]:
    version = platform.python_version()
    # Python is compatible within a minor version, so the patch number may differ
    minor = f"{version.rpartition('.')[0]} ({platform.python_implementation()})"
    path = f"{sys.executable} ({version})"
    package = f"{__version__} in {Path(__file__).parents[2]}"
    return [
        Row(OK, minor, _ONE_PYTHON, "Python", unlike=FAIL),
        Row(OK, path, _ONE_PYTHON, "Python's path", unlike=WARN),
        Row(OK, package, _ONE_PYTHON, "mpidist", unlike=FAIL),
    ]


def _check_package(name: str) -> Row:
    version = "of unknown version"
    try:
        importlib.import_module(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == name
        found = "not installed" if is_missing else describe_error(error)
        return Row(FAIL, found, f"{sys.executable} -m pip install {name}")
    return Row(OK, version, _ONE_PYTHON, unlike=FAIL)


def _check_hdf5() -> list[Row]:
    import h5py

    library = h5py.version.hdf5_version
    library += ", built for MPI" * bool(h5py.get_config().mpi)
    remedy = "install the same h5py on all nodes"
    rows = [Row(OK, library, remedy, "HDF5", unlike=FAIL)]
    filters = [n for n, code in _FILTERS.items() if h5py.h5z.filter_avail(code)]
    row = Row(OK, ", ".join(filters), "give all ranks the same plugins", unlike=WARN)
    if not {"gzip", "shuffle", "fletcher32"} <= set(filters):
        remedy = f"{sys.executable} -m pip install --force-reinstall h5py (its wheels "
        row = Row(WARN, row.found, f"{remedy}have gzip, shuffle and fletcher32)")
    rows.append(row._replace(what="HDF5's filters"))
    locking = os.environ.get(LOCKING, "not set")
    if locking in ("not set", *_LOCKING_VALUES):
        return [*rows, Row(OK, locking, what=LOCKING)]
    remedy = f"use one of {', '.join(_LOCKING_VALUES)}, or unset it"
    return [*rows, Row(WARN, f"{locking}, which HDF5 does not know", remedy, LOCKING)]


def check_gpus() -> list[Row]:
    """Return rows on the GPUs that this process sees. It starts CUDA."""
    from mpidist.device import binding

    remedy = "pip install cupy-cuda12x or cupy-cuda13x, as the driver needs"
    is_installed = importlib.util.find_spec("cupy") is not None
    try:
        count = binding.gpu_count() if is_installed else 0
        gpus = [binding.identify_gpu(i, "") for i in range(count)]
    except ImportError as error:
        why = " ".join(str(error).split())
        return [Row(FAIL, f"CuPy is broken: {why}", f"reinstall it: {remedy}")]
    if gpus:
        found = ", ".join(f"{gpu.name} {gpu.pci_bus_id}" for gpu in gpus)
        driver = f"{gpus[0].driver // 1000}.{gpus[0].driver % 1000 // 10}"
        cuda = f"CuPy {binding.cupy_version()}, driver for CUDA {driver}"
        remedy = "install the same CuPy and driver on all nodes"
        return [Row(OK, found), Row(OK, cuda, remedy, "CUDA", unlike=WARN)]
    why = "CuPy sees none" if is_installed else "CuPy is not installed"
    if binding.cuda_errors:
        remedy = "see what nvidia-smi says; the driver must be as new as CuPy's CUDA"
        return [Row(WARN, f"{why}: {', '.join(binding.cuda_errors)}", remedy)]
    if any(Path(path).exists() for path in _GPU_DEVICES):
        remedy += ", and check that CUDA_VISIBLE_DEVICES is not empty"
        return [Row(WARN, f"there is an NVIDIA driver, but {why}", remedy)]
    return [Row(OK, f"none ({why})")]


# Each runs in a child process, as a package or driver may crash or block
LOCAL_CHECKS: dict[str, tuple[Any, ...]] = {
    "Python": (_check_python,),
    **{name: (_check_package, name) for name in NEEDED},
    "h5py's HDF5": (_check_hdf5,),
    "GPUs": (check_gpus,),
}


def is_hydra() -> bool:
    """Return whether MPICH's mpirun, or one like it, started this process."""
    started = find_launcher(os.environ)
    return started is not None and started.launcher is HYDRA


def check_launcher(size: int, environ: Mapping[str, str], error: str) -> Row:
    """Compare the size of COMM_WORLD with the launcher's.

    Args:
      size: of COMM_WORLD.
      environ: from before MPI started.
      error: of `check_launch`; empty if none.
    """
    started = find_launcher(environ)
    sees = f"MPI sees {counted(size, 'process', 'processes')}"
    if started is None:
        some = f"{sees}, by a launcher that does not say how many"
        return Row(OK, some if size > 1 else "one process, without a launcher")
    if error:
        return Row(FAIL, f"{sees}; {started}", error)
    if started.processes == size:
        return Row(OK, f"{sees}; {started}")
    remedy = "unset variables left by another launcher, or restart the job"
    if size == 1 and ALLOW_SINGLETON.read_or_default(environ):
        remedy = f"{ALLOW_SINGLETON.name}=1 allows that; unset it if not intended"
    return Row(WARN, f"{sees}; {started}", remedy)


def check_thread_level(level: int) -> Row:
    """Return a row on the level of threads in MPI, from 0 to 3."""
    found = f"MPI_THREAD_{_THREAD_LEVELS[level]}"
    if level == 3:
        return Row(OK, found)
    lost = "a cache that ranks share (Dataset.cache)"
    if level < 2:
        lost = "collectives from threads, such as gradient buckets, and shared caches"
    remedy = "unset MPI4PY_RC_THREAD_LEVEL and other settings that lower it, or use an "
    remedy += "MPI built with MPI_THREAD_MULTIPLE"
    return Row(WARN if level == 2 else FAIL, f"{found}, too low for {lost}", remedy)


def check_memory(ranks: int, folder: Path = Path(_SHARED_FOLDER)) -> list[Row]:
    """Return rows on the memory of a node, shared and other, for so many ranks."""
    rows = [_check_shared(ranks, folder)._replace(what=f"shared memory ({folder})")]
    files, size = count_left(folder, Path("/proc"))
    if files:
        found = f"{as_text(size)} in {files} files of ended jobs in {folder}"
        remedy = f"remove them: cd {folder} && for f in {' '.join(_MPI_FILES)}; "
        remedy += 'do fuser -s "$f" || rm -f "$f"; done'
        rows.append(Row(WARN, found, remedy, "left by MPI"))
    limits = free_bytes(is_shared=False)
    if limits:
        free, name = min((free, name) for name, free in limits.items())
        found = f"{as_text(free)} free, limited by {name}"
        rows.append(Row(OK, found, what="memory"))
    return rows


def _check_shared(ranks: int, folder: Path) -> Row:
    remedy = f"make {folder} larger (containers: docker run --shm-size=8g, or "
    remedy += "--ipc=host), and remove files of dead jobs there"
    if not folder.is_dir():
        return Row(FAIL, f"there is no {folder}", remedy)
    status = os.statvfs(folder)
    size, free = (n * status.f_frsize for n in (status.f_blocks, status.f_bavail))
    found = f"{as_text(free)} free of {as_text(size)}"
    if free >= _GOOD_BYTES * ranks:
        return Row(OK, found)
    return Row(FAIL if free < _LEAST_BYTES * ranks else WARN, found, remedy)


def count_left(folder: Path, processes: Path) -> tuple[int, int]:
    """Return how many of MPI's files no process uses, and their bytes.

    MPI libraries remove their files when all ranks have opened them, or at the end. A
    job that is killed before leaves them. Only this user's count: who uses those of
    others cannot be seen.

    Args:
      folder: of shared memory.
      processes: like /proc.
    """
    sizes = {}
    for path in (path for pattern in _MPI_FILES for path in folder.glob(pattern)):
        with contextlib.suppress(OSError):  # just removed
            status = path.stat()
            is_old = time.time() - status.st_mtime > _STARTING_SECONDS
            if status.st_uid == os.getuid() and is_old:
                sizes[str(path)] = status.st_blocks * 512
    used = set(chain(*map(_open_files, processes.glob("[0-9]*")))) if sizes else ()
    left = [size for path, size in sizes.items() if path not in used]
    return len(left), sum(left)


def _open_files(process: Path) -> list[str]:
    names = []
    with contextlib.suppress(OSError):  # of another user, or ended
        maps = (process / "maps").read_text(errors="replace")
        names = [line.split(maxsplit=5)[-1] for line in maps.splitlines()]
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # just closed
                names.append(os.readlink(link))
    return names


class RankFacts(NamedTuple):
    """What is compared between ranks."""

    variables: Mapping[str, str]  # that should be the same
    host: str
    cores: frozenset[int]  # processors in the affinity mask
    physical: frozenset[int]  # the first processor of each physical core
    machine_cores: int
    threads: str  # what limits those of NumPy's linear algebra: "NAME=value", or ""
    node: int | None = None  # the lowest rank there; None before MPI has said that


def find_facts(environ: Mapping[str, str]) -> RankFacts:
    """Return this process's facts.

    Args:
      environ: from before MPI started. But MPI may bind the process to cores.
    """
    cores = frozenset(available_cores())
    variable = next((name for name in _THREAD_VARIABLES if environ.get(name)), "")
    return RankFacts(
        {
            name: value
            for name, value in environ.items()
            if name in _NAMES
            or (name.startswith(_PREFIXES) and not differs_by_rank(name))
        },
        platform.node(),
        cores,
        frozenset(map(physical_core, cores)),
        os.cpu_count() or len(cores),
        f"{variable}={environ[variable]}" if variable else "",
    )


Facts = Mapping[int, RankFacts]  # by rank


def check_variables(facts: Facts) -> list[Row]:
    """Return rows on settings that are invalid and variables that differ, or OK."""
    rows = merge({rank: _check_settings(f.variables) for rank, f in facts.items()})
    names = sorted(set().union(*(fact.variables for fact in facts.values())))
    for name in names:
        values = {r: fact.variables.get(name, "not set") for r, fact in facts.items()}
        if len(set(values.values())) > 1:
            is_ours = name.startswith(PREFIX) and name not in _MAY_DIFFER
            shown = {
                rank: text[:_SHOWN_LETTERS] + "..." * (len(text) > _SHOWN_LETTERS)
                for rank, text in values.items()
            }
            remedy = "set it to the same value on all ranks, or on none "
            remedy += "(mpirun -x or -genv)"
            rows.append(Row(FAIL if is_ours else WARN, by_rank(shown), remedy, name))
    if not rows:
        same = ", the same on all ranks" if len(facts) > 1 else ""
        rows.append(Row(OK, f"{counted(len(names), 'variable')} that matter{same}"))
    return rows


def _check_settings(variables: Mapping[str, str]) -> list[Row]:
    """Return a row for each variable that prevents creating a strategy."""
    wrong = dict(unknown_names(variables))
    for setting in SETTINGS:
        try:
            setting.read(variables)
        except LaunchError as error:
            wrong[setting.name] = str(error)
    remedy = "correct it, or unset it: no strategy can be created with it"
    return [
        Row(FAIL, reason, remedy, f"{name}, as a setting")
        for name, reason in wrong.items()
    ]


def _by_node(facts: Facts) -> Iterable[Facts]:
    nodes: dict[int, dict[int, RankFacts]] = {}
    for rank, fact in facts.items():
        if fact.node is not None:
            nodes.setdefault(fact.node, {})[rank] = fact
    return nodes.values()


def check_nodes(facts: Facts) -> Row | list[Row]:
    """Return a row on which ranks are on which node."""
    nodes = _by_node(facts)
    texts = [f"{ranks[min(ranks)].host}: {name_ranks(ranks)}" for ranks in nodes]
    if not texts:
        return []
    shown = "; ".join(texts[:_SHOWN_NODES]) + "; ..." * (len(texts) > _SHOWN_NODES)
    found = f"{counted(len(texts), 'node')} ({shown})"
    sizes = sorted(set(map(len, nodes)))
    if len(sizes) > 1:
        remedy = "start the same number of ranks on each node: ranks wait for each "
        found += f"; different numbers of ranks: {', '.join(map(str, sizes))}"
        return Row(WARN, found, f"{remedy}other")
    return Row(OK, found)


def check_binding(facts: Facts) -> Row:
    """Return a row on which ranks share cores."""
    crowded: list[str] = []
    oversubscribed: list[str] = []
    siblings: list[str] = []
    for node in _by_node(facts):
        everywhere = frozenset().union(*(fact.cores for fact in node.values()))
        for mask, inside in _crowds({r: fact.cores for r, fact in node.items()}):
            # Too few cores for all ranks is not a wrong binding
            is_alone = len(mask) == 1 < node[inside[0]].machine_cores
            texts = crowded if mask != everywhere or is_alone else oversubscribed
            texts.append(f"{name_ranks(inside)} on {name_ranks(mask, 'core')}")
        physical = _crowds({r: fact.physical for r, fact in node.items()})
        siblings += [name_ranks(inside) for _, inside in physical]
    if crowded:
        remedy = "bind each rank to its own cores: mpirun --bind-to core, or srun "
        remedy += "--cpu-bind=cores with --cpus-per-task"
        return Row(FAIL, f"ranks share cores: {'; '.join(crowded)}", remedy)
    if oversubscribed:
        remedy = "start at most one rank per core: ranks busy-wait for each other"
        return Row(WARN, f"more ranks than cores: {'; '.join(oversubscribed)}", remedy)
    if siblings:
        remedy = "use srun --hint=nomultithread, or mpirun --bind-to core"
        return Row(WARN, f"threads of one core: {'; '.join(siblings)}", remedy)
    found = {
        rank: f"{name_ranks(fact.cores, 'core')} of {fact.machine_cores}"
        for rank, fact in facts.items()
    }
    return Row(OK, by_rank(found))


def _crowds(
    masks: Mapping[int, frozenset[int]],
) -> Iterator[tuple[frozenset[int], list[int]]]:
    """Yield sets of cores that have more ranks bound to them than cores."""
    for mask in set(masks.values()):
        inside = [rank for rank, own in masks.items() if own <= mask]
        if len(inside) > len(mask):
            yield mask, inside


def check_threads(facts: Facts) -> Row:
    """Compare the threads of linear algebra with the cores."""
    threads = {rank: _count_threads(fact) for rank, fact in facts.items()}
    bad = {rank: facts[rank].threads for rank, count in threads.items() if count < 1}
    if bad:
        remedy = "set it to a number of threads, such as 1"
        return Row(WARN, f"not a number: {by_rank(bad)}", remedy)
    texts, fitting = [], []
    for node in _by_node(facts):
        cores = frozenset().union(*(fact.cores for fact in node.values()))
        count = sum(threads[rank] for rank in node)
        # One rank alone may use what it has
        if count > len(cores) and len(node) > 1:
            where = f"{name_ranks(node)} on {name_ranks(cores, 'core')}"
            texts.append(f"{count} threads of {where}")
            fitting.append(max(1, len(cores) // len(node)))
    if texts:
        remedy = f"set OMP_NUM_THREADS={min(fitting)} on all ranks"
        return Row(WARN, "; ".join(texts), remedy)
    return Row(OK, by_rank({rank: f"{n} per rank" for rank, n in threads.items()}))


def _count_threads(fact: RankFacts) -> int:
    """Return the threads of linear algebra; 0 if the variable is not a number."""
    if not fact.threads:
        return len(fact.cores)
    # One number for each level of nesting
    value = fact.threads.partition("=")[2].partition(",")[0]
    return decimal(value.strip()) or 0


JOB_CHECKS: dict[str, Callable[[Facts], Row | list[Row]]] = {
    "environment": check_variables,
    "nodes": check_nodes,
    "binding": check_binding,
    "threads": check_threads,
}


def evaluate(everyone: Mapping[int, Sequence[Row]], facts: Facts) -> list[Row]:
    """Return the rows of the table from those of each rank, and from their facts."""
    rows = merge(everyone)
    for what, check in JOB_CHECKS.items():
        rows += examine(what, check, facts)
    return rows
