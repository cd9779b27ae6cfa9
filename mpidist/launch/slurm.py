"""What Slurm's variables say about the tasks of a job step, and their addresses.

`mpidist.cluster_resolver` is this module, with the interface of
`tf.distribute.cluster_resolver`. MPI does not need it. It is for programs written for
TensorFlow's resolver, and for servers that need an address for each rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from mpidist.errors import ArgumentError, ArgumentTypeError, LaunchError
from mpidist.launch.allocations import expand_hosts, expand_tasks
from mpidist.launch.launchers import SRUN, STEP_OF_SLURM, find_launcher
from mpidist.util import validation
from mpidist.util.representation import one_line
from mpidist.util.settings import decimal

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class ClusterSpec(dict[str, list[str]]):
    """The addresses of each job's tasks: a dict of lists, with TensorFlow's methods."""

    def as_dict(self) -> dict[str, list[str]]:
        """Return a plain dict, for JSON."""
        return {job: list(addresses) for job, addresses in self.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, sorted."""
        return sorted(self)

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has."""
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the numbers of a job's tasks."""
        return list(range(self.num_tasks(job_name)))

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of a job's tasks; ArgumentError if it is not there."""
        if job_name not in self:
            raise ArgumentError(f"there is no job {job_name!r}, only {self.jobs}")
        return list(self[job_name])

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task; ArgumentError if it is not there."""
        addresses = self.job_tasks(job_name)
        if not 0 <= task_index < len(addresses):
            raise ArgumentError(
                f"job {job_name!r} has tasks 0 to {len(addresses) - 1}, not "
                f"{task_index}"
            )
        return addresses[task_index]


class SlurmClusterResolver:
    """Names and addresses of the tasks of a Slurm job step, from Slurm's variables.

    For processes that srun started. (Below mpirun, Slurm's variables describe mpirun's
    daemons.) Not collective; the result is the same on all ranks.

    Args:
      jobs: number of tasks of each job, by name; jobs get ranks in the order of their
        names. None makes all ranks tasks of the job "worker".
      port_base: the port in the address of the first task on a node; further tasks get
        the next ports. No process listens there.
      gpus_per_node: None counts the GPUs that Slurm or CUDA_VISIBLE_DEVICES lists.
      gpus_per_task: None divides a node's GPUs by the largest number of tasks on a
        node.
      tasks_per_node: a number, or the number for each host; None asks Slurm.
      auto_set_gpu: whether `cluster_spec` sets CUDA_VISIBLE_DEVICES to this task's
        share of the node's GPUs. It does not change the variable if Slurm has bound
        GPUs to tasks (`--gpus-per-task`), or if there are no GPUs.
      rpc_layer: the prefix of the addresses that `master` returns.

    Raises:
      LaunchError: a variable of Slurm is missing; more GPUs, or different tasks, are
        requested than exist. (A RuntimeError, as in TensorFlow.)
      ArgumentError, ArgumentTypeError: numbers of GPUs below 0; jobs without names.

    Example, in a job of 4 ranks on 2 nodes that srun started:
      >>> import os
      >>> os.environ.update(
      ...     SLURM_PROCID="3",
      ...     SLURM_STEP_NUM_TASKS="4",
      ...     SLURM_STEP_NODELIST="node[08-09]",
      ...     SLURM_STEP_TASKS_PER_NODE="2(x2)",
      ... )
      >>> resolver = mpidist.SlurmClusterResolver({"worker": 3, "evaluator": 1})
      >>> resolver.cluster_spec()["worker"]
      ['node08:8889', 'node09:8888', 'node09:8889']
      >>> resolver.get_task_info()
      ('worker', 2)
      >>> resolver.master()
      'grpc://node09:8889'
    """

    environment = ""
    """The empty text, as in TensorFlow."""

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ):
        self._rank = _number(STEP_OF_SLURM.rank)
        self._port_base = validation.integer("port_base", port_base, 0)
        hosts = _tasks_of_hosts(tasks_per_node)
        # By rank: its host, and its number there
        self._tasks = [(host, i) for host, n in hosts.items() for i in range(n)]
        count = len(self._tasks)
        jobs = {"worker": _number(STEP_OF_SLURM.size)} if jobs is None else jobs
        self._jobs = _numbers_of("jobs", jobs)
        if (asked := sum(self._jobs.values())) != count:
            raise LaunchError(f"jobs have {asked} tasks, but Slurm started {count}")
        if self._rank >= count:
            raise LaunchError(
                f"{STEP_OF_SLURM.rank}={self._rank} is not one of the {count} tasks on "
                f"{list(hosts)}"
            )
        self._gpus, self._gpus_per_task = _find_gpus(
            gpus_per_node, gpus_per_task, max(hosts.values())
        )
        self._sets_gpus = validation.switch("auto_set_gpu", auto_set_gpu)
        self.task_type: str | None = None
        self.task_id: int | None = None
        self.rpc_layer = rpc_layer

    def __repr__(self) -> str:
        return one_line(self, lambda: f"task {self._rank} of {self._jobs}")

    def cluster_spec(self) -> ClusterSpec:
        """Return each job's addresses, in the order of the ranks.

        Afterwards `task_type` and `task_id` are known for this process. With
        `auto_set_gpu`, the GPUs are assigned.
        """
        addresses = [f"{host}:{self._port_base + i}" for host, i in self._tasks]
        spec, start = ClusterSpec(), 0
        for job, count in sorted(self._jobs.items()):
            spec[job] = addresses[start : start + count]
            if 0 <= self._rank - start < count:
                self.task_type, self.task_id = job, self._rank - start
            start += count
        first = self._tasks[self._rank][1] * self._gpus_per_task
        mine = self._gpus[first : first + self._gpus_per_task]
        if self._sets_gpus and mine:
            os.environ[_VISIBLE] = ",".join(mine)
        return spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return this process's job and number there; None before `cluster_spec`."""
        return self.task_type, self.task_id

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default this one's; "" if that is unknown.

        Raises:
          ArgumentError: there is no such task.
        """
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            return ""
        layer = f"{layer}://" if (layer := rpc_layer or self.rpc_layer) else ""
        return layer + self.cluster_spec().task_address(job, index)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the GPUs of each task, as `{"GPU": n}`; arguments are ignored."""
        return {"GPU": self._gpus_per_task}


def below_srun(rank: int, size: int) -> SlurmClusterResolver | None:
    """Return a resolver if srun started this process as `rank` of `size`, else None.

    It knows this process's task, and does not assign GPUs.
    """
    # Below mpirun, Slurm's variables describe mpirun's daemons
    if find_launcher(os.environ) != (SRUN, size, rank):
        return None
    try:
        resolver = SlurmClusterResolver(auto_set_gpu=False)
    except LaunchError:
        return None
    resolver.cluster_spec()
    return resolver


def _find_gpus(
    per_node: int | None, per_task: int | None, tasks: int
) -> tuple[list[str], int]:
    """Return the names of a node's GPUs, and how many of them each task gets.

    There are no names if Slurm has bound GPUs to tasks.
    """
    per_node = validation.optional_integer("gpus_per_node", per_node, 0)
    per_task = validation.optional_integer("gpus_per_task", per_task, 0)
    visible = os.environ.get(_VISIBLE, "").replace(",", " ").split()
    on_node = decimal(os.environ.get("SLURM_GPUS_ON_NODE", ""))
    on_node = len(visible) if on_node is None else on_node
    are_bound = 0 < len(visible) < on_node
    per_node = on_node if per_node is None else per_node
    if per_task is None:
        per_task = len(visible) if are_bound else per_node // tasks
    if tasks * per_task > per_node:
        raise LaunchError(
            f"{tasks} tasks on a node with {per_task} GPUs each need more than the "
            f"{per_node} that it has"
        )
    if not are_bound and len(visible) != per_node:
        visible = list(map(str, range(per_node)))
    return [] if are_bound else visible, per_task


def _tasks_of_hosts(asked: int | Mapping[str, int] | None) -> dict[str, int]:
    """Return how many tasks each host has, in the order of the ranks.

    That is Slurm's order of hosts. (TensorFlow sorts them as words, node10 before
    node9, so that there a rank may be given another's address.)
    """
    if isinstance(asked, Mapping):
        return _numbers_of("tasks_per_node", asked)
    asked = validation.optional_integer("tasks_per_node", asked, 1)
    hosts = expand_hosts(_variable("SLURM_STEP_NODELIST"))
    if asked is not None:
        return dict.fromkeys(hosts, asked)
    tasks = expand_tasks(_variable("SLURM_STEP_TASKS_PER_NODE"))
    if len(tasks) != len(hosts):
        raise LaunchError(f"Slurm names {len(hosts)} hosts, and tasks of {len(tasks)}")
    return dict(zip(hosts, tasks, strict=True))


def _numbers_of(argument: str, tasks: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(tasks, Mapping):
        raise ArgumentTypeError(
            f"{argument} must be numbers of tasks by name, not "
            f"{validation.shown(tasks)}"
        )
    return {
        name: validation.integer(f"{argument}[{name!r}]", count, 0)
        for name, count in tasks.items()
    }


def _variable(name: str) -> str:
    if name not in os.environ:
        raise LaunchError(
            f"{name} is not set: this process was not started by Slurm's srun"
        )
    return os.environ[name]


def _number(name: str) -> int:
    text = _variable(name)
    if (number := decimal(text)) is None:
        raise LaunchError(f"{name} must be a number, not {text!r}")
    return number
