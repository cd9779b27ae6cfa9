"""What the collectives of one strategy share."""

from __future__ import annotations

from typing import Any

from mpidist.comm.collectives.arguments import (
    check_each,
    implementation_of,
    to_arrays,
)
from mpidist.comm.collectives.outputs import Results
from mpidist.comm.collectives.plans import PlanCache
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.transports.selector import TransportSelector
from mpidist.device.copies import SmallCopies
from mpidist.options import CommunicationOptions
from mpidist.util import nest, validation


class State:
    """What the collectives of one strategy share.

    Args:
      consensus: of all ranks.
      transports: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: allocates the results.
    """

    def __init__(
        self,
        consensus: Consensus,
        transports: TransportSelector,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self.consensus = consensus
        self.size = consensus.size
        self.transports = transports
        self.transport = transports.default
        self.symmetric = symmetric
        self.results = results
        self.plans = PlanCache(consensus)
        self.copies = SmallCopies()


def take(
    state: State, value: Any, options: CommunicationOptions
) -> tuple[list[Any], nest.Spec, list[Any]]:
    """Like `to_arrays`; also checks that there are transports for the arrays."""
    validation.instance("options", options, CommunicationOptions)
    leaves, spec, given = to_arrays(value)
    # One rank moves nothing, so it can reduce arrays wherever they are.
    if state.size > 1:
        check_each(given, spec, state.transports.require_reachable)
        state.transports.require_implementation(implementation_of(options))
    return leaves, spec, given
