"""MirroredStrategy, and the default strategy."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpidist.comm.cross_device_ops import CrossDeviceOps
from mpidist.comm.device_info import GpuRequest
from mpidist.comm.packing import Axis
from mpidist.comm.replica_group import banner, show_once
from mpidist.comm.topology import job_size
from mpidist.context import set_default_strategy
from mpidist.monitor.statistics import report_at_end
from mpidist.monitor.timeline import start_by_environment
from mpidist.reductions import ReduceOp
from mpidist.strategy.replica_context import DefaultReplicaContext
from mpidist.strategy.v1 import StrategyExtendedV1, StrategyV1
from mpidist.util.representation import html_table


class MirroredStrategy(StrategyV1):
    """Synchronous data parallelism: one replica per rank, variables equal on all.

    Collective over the communicator. The first one of a program prints a line to stderr
    on rank 0: replicas, nodes, MPI, devices and transport. (MPIDIST_BANNER=0 turns this
    off.)

    Args:
      devices: None takes this rank's GPU, else the CPU. A list of strings like "GPU:0"
        and "CPU:0" is indexed by the rank on its node; a list of one string applies to
        all ranks.
      cross_device_ops: how values are reduced, see `CrossDeviceOps`; None lets MPI
        reduce arrays on their device.
      communicator: the ranks that take part, COMM_WORLD by default. It is duplicated,
        so that the strategy's messages are separate from the program's.
      allow_shared_gpu: whether ranks may share a GPU; otherwise that raises
        LaunchError. MPIDIST_ALLOW_SHARED_GPU=1 allows it too.
      cuda_aware: whether MPI accepts GPU pointers; None asks the library and tests it
        in a separate job. MPIDIST_CUDA_AWARE (0 or 1) sets it too.

    Raises, on all replicas:
      ArgumentError: `devices` is empty or malformed.
      LaunchError: the launcher started several processes but MPI sees one; a GPU cannot
        be used, or ranks share it; the hardware for `cross_device_ops` is missing; one
        of mpidist's environment variables is not 0 or 1, on any rank.
      MismatchError: kinds of `cross_device_ops` or of devices differ between ranks.
      ContextError: `cross_device_ops` belongs to another strategy already.
      ArgumentTypeError: `cross_device_ops` is not a CrossDeviceOps, or a flag is not a
        bool. If `communicator` is not a communicator, only the ranks that passed it
        raise.

    Example:
      >>> strategy = mpidist.MirroredStrategy(["CPU:0"])
      >>> strategy  # on replica 0
      <MirroredStrategy: replica 0 of 2 on CPU:0>
      >>> strategy.reduce("MEAN", np.array([1.0, 3.0]))
      array([1., 3.])
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        communicator: MPI.Intracomm | None = None,
        allow_shared_gpu: bool = False,
        cuda_aware: bool | None = None,
    ):
        self._gpu_request = GpuRequest(allow_shared_gpu, cuda_aware)
        super().__init__(
            lambda strategy: StrategyExtendedV1(
                strategy, devices, cross_device_ops, communicator, self._gpu_request
            )
        )
        self._devices = None if devices is None else copy.copy(devices)
        show_once(self._extended, "banner", lambda: banner(self._extended))
        report_at_end(self._extended)
        if self._extended.timeline_folder:
            start_by_environment(self._extended)

    def _repr_html_(self) -> str:
        group = self._extended
        rows = [
            ("replicas", group.num_replicas),
            ("this replica", group.replica_id),
            ("device", group.device),
        ]
        alone = "This job is one rank; `mpirun -n 4 python script.py` starts four."
        note = alone if group.num_replicas == 1 else ""
        return html_table(type(self).__name__, rows, note)

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredStrategy:
        """Return an independent strategy of the same ranks and devices.

        Collective. Its `cross_device_ops` is an unused copy.
        """
        self._extended.topology.require_open()
        twin = type(self)(
            self._devices,
            self._extended.cross_device_ops.unbound(),
            communicator=self._extended.topology.comm,
            allow_shared_gpu=self._gpu_request.allow_shared,
            cuda_aware=self._gpu_request.cuda_aware,
        )
        memo[id(self)] = twin
        return twin


class _DefaultStrategy(StrategyV1):
    """The strategy outside all scopes: one replica, this process, no communication."""

    def __init__(self) -> None:
        super().__init__(
            lambda strategy: StrategyExtendedV1(
                strategy, ["CPU:0"], communicator=MPI.COMM_SELF
            )
        )
        self._extended.is_default = True

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: Axis | None = None
    ) -> Any:
        return value

    def gather(self, value: Any, axis: int) -> Any:
        return value

    def experimental_finalize(self) -> list[Any]:
        return []


_default = _DefaultStrategy()
set_default_strategy(_default, DefaultReplicaContext(_default, job_size()))
