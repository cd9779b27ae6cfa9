"""The private parts of JAX that this room needs; tried on JAX 0.6 and 0.10."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
from jax._src import xla_bridge
from jax._src.core import trace_state_clean

# Where JAX logs the errors of callbacks, which it raises as well
CALLBACK_LOGGER = logging.getLogger("jax._src.callback")
_is_idle: Callable[[], bool] = trace_state_clean


def is_tracing() -> bool:
    """Return whether JAX traces a computation in this thread."""
    return not _is_idle()


def dispatch_synchronously() -> bool:
    """Make JAX dispatch synchronously; return False if it is too late for that."""
    was_synchronous = not jax.config.values["jax_cpu_enable_async_dispatch"]
    is_early = not xla_bridge.backends_are_initialized()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return was_synchronous or is_early
