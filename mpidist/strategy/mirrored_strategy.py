"""MirroredStrategy, and the strategy that holds by default."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpidist.comm.banner import show_banner
from mpidist.comm.cross_device_ops import CrossDeviceOps
from mpidist.comm.device_info import GpuRequest
from mpidist.comm.packing import Axis
from mpidist.context import set_default_strategy
from mpidist.monitor.statistics import report_at_end
from mpidist.monitor.timeline import start_by_environment
from mpidist.options import ReduceOp
from mpidist.strategy.replica_context import DefaultReplicaContext
from mpidist.strategy.v1 import StrategyExtendedV1, StrategyV1

__all__ = ["MirroredStrategy"]


class MirroredStrategy(StrategyV1):
    """Synchronous data parallelism: one replica per rank, variables equal on all.

    Collective over the communicator. The first one of a program prints a line to
    stderr, on rank 0: replicas, nodes, MPI, devices, and what moves data. (The variable
    MPIDIST_BANNER=0 keeps it from that.)

    Args:
      devices: None takes this rank's GPU, else the CPU. A list of strings like "GPU:0"
        and "CPU:0" is indexed by the rank on its node; a list of one holds for all.
      cross_device_ops: how values are reduced, see `CrossDeviceOps`; None lets MPI
        reduce arrays where they lie.
      communicator: the ranks that take part, COMM_WORLD by default. It is duplicated,
        so that nothing else can meet the strategy's messages.
      allow_shared_gpu: whether ranks may share a GPU, which is a LaunchError otherwise.
        So may the variable MPIDIST_ALLOW_SHARED_GPU=1.
      cuda_aware: whether MPI takes addresses of memory on GPUs; None finds out, by
        asking the library and trying it in a job of its own. The variable
        MPIDIST_CUDA_AWARE (0 or 1) says it, too.

    Raises, on all replicas:
      ArgumentError: no devices, or malformed ones.
      LaunchError: the launcher started several processes but MPI sees one; a GPU that
        cannot be used, or that ranks share; a `cross_device_ops` without its hardware;
        a variable of mpidist that is neither 0 nor 1, on any rank.
      MismatchError: kinds of `cross_device_ops` or of devices differ between ranks.
      ContextError: `cross_device_ops` belongs to another strategy already.
      ArgumentTypeError: `cross_device_ops` is no CrossDeviceOps; neither True nor
        False. (Where `communicator` is none, only on the ranks that passed it.)

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
        show_banner(self.extended)
        report_at_end(self.extended)
        start_by_environment(self.extended)

    def _repr_html_(self) -> str:
        from mpidist.util.html_tables import html_table

        group = self.extended
        rows = [
            ("replicas", group.num_replicas),
            ("this replica", group.replica_id),
            ("device", group.device),
        ]
        alone = "This job is one rank; `mpirun -n 4 python script.py` starts four."
        note = alone if group.num_replicas == 1 else ""
        return html_table(type(self).__name__, rows, note)

    def __deepcopy__(self, memo: dict[int, Any]) -> MirroredStrategy:
        """Return a strategy of the same ranks and devices that shares nothing else.

        Collective. Its `cross_device_ops` is a copy as it was before its use.
        """
        self.extended.topology.require_open()
        twin = type(self)(
            self._devices,
            self.extended.cross_device_ops.unbound(),
            communicator=self.extended.topology.comm,
            allow_shared_gpu=self._gpu_request.allow_shared,
            cuda_aware=self._gpu_request.cuda_aware,
        )
        memo[id(self)] = twin
        return twin


class _DefaultStrategy(StrategyV1):
    """What holds outside all scopes: one replica, this process, no communication."""

    def __init__(self) -> None:
        super().__init__(
            lambda strategy: StrategyExtendedV1(
                strategy, ["CPU:0"], communicator=MPI.COMM_SELF
            )
        )

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: Axis | None = None
    ) -> Any:
        return value

    def gather(self, value: Any, axis: int) -> Any:
        return value

    def experimental_finalize(self) -> list[Any]:
        return []


_default = _DefaultStrategy()
set_default_strategy(
    _default, DefaultReplicaContext(_default, MPI.COMM_WORLD.Get_size())
)
