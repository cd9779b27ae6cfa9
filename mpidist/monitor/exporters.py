"""Scalars by name as gauges of Prometheus; docs/monitoring.md has the rest.

Needs `pip install prometheus_client`. `import mpidist` does not import this.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.util import logs, validation
from mpidist.util.files import replace_file

if TYPE_CHECKING:
    from types import TracebackType

    from mpidist.comm.replica_group import ReplicaGroup

_OPEN = "ScalarWriter"
_LABELS = "name", "job"
_LEAST_SECONDS = 1.0  # between two versions of the file


class _HasGroup(Protocol):
    """A strategy, which this package cannot import."""

    @property
    def extended(self) -> ReplicaGroup: ...


class ScalarWriter:
    """Writes scalars by name, on rank 0, for the textfile collector of Prometheus.

    Creating one is collective. `write` is not: all ranks may call it, or only rank 0;
    only rank 0 writes. If the file cannot be written later (a full disk), the log has a
    warning and the job continues without it.

    Args:
      strategy: of the job.
      prometheus: the file, whose name ends in ".prom"; it is replaced atomically, at
        most once a second. The scalar "loss/train" is the gauge
        `mpidist_loss_train{name="loss/train", job="..."}`, and `mpidist_step` is the
        last step; a scalar "step" is the gauge `mpidist_scalar_step`.
      job: a label of all gauges.

    Raises, on all ranks:
      ArgumentError: the file does not end in ".prom".
      ArgumentTypeError: it is not a path, or `job` not text.
      UnsupportedError: prometheus_client is not installed on rank 0.
      OSError: the file cannot be created.

    Example:
      >>> from mpidist.monitor.exporters import ScalarWriter
      >>> with ScalarWriter(strategy, prometheus="job.prom", job="digits") as scalars:
      ...     scalars.write({"loss": 0.5}, step=1)
    """

    def __init__(
        self,
        strategy: _HasGroup,
        *,
        prometheus: str | os.PathLike[str],
        job: str = "",
    ):
        group = strategy.extended
        group.topology.require_open()
        self._client: Any = None  # on the ranks that write

        def check() -> Path:
            validation.instance("job", job, str)
            path = validation.absolute("prometheus", prometheus)
            if path.suffix != ".prom":
                raise ArgumentError(
                    "prometheus must end in .prom, the only files that the node "
                    f"exporter reads, not {path.name!r}"
                )
            return path

        self._path, self._job = group.consensus.run(_OPEN, check), job
        group.consensus.root_only(_OPEN, self._open)

    def _open(self) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise UnsupportedError(
                "Prometheus' format needs prometheus_client, which is not installed: "
                "pip install prometheus_client"
            ) from None
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._client = prometheus_client
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._replace()
        self._written = -math.inf  # write the first scalars at once

    def write(self, scalars: Mapping[str, Any], step: int) -> None:
        """Write scalars on rank 0. Not collective.

        Args:
          scalars: numbers by name; also arrays and tensors of one element.
          step: the step of the scalars.

        Raises, on the ranks that call it:
          ArgumentTypeError: a value is not a number, or a name is not text.
          ArgumentError: a name that is not valid Unicode.
        """
        step = validation.integer("step", step, -validation.LARGEST)
        if not isinstance(scalars, Mapping):
            raise ArgumentTypeError(
                f"scalars must be a dict of numbers, not {validation.shown(scalars)}"
            )
        numbers = {_name(name): _number(name, x) for name, x in scalars.items()}
        if self._client is None:
            return
        for name, x in numbers.items():
            self._set("scalar_step" if name == "step" else name, name, x)
        self._set("step", "step", step)
        if time.monotonic() - self._written >= _LEAST_SECONDS:
            self._try_to_replace()

    def _set(self, metric: str, name: str, value: float) -> None:
        """Set a gauge; those whose names differ only in signs are one."""
        metric = "mpidist_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        if metric not in self._gauges:
            text = "scalar of an mpidist job"
            self._gauges[metric] = self._client.Gauge(
                metric, text, _LABELS, registry=self._registry
            )
        self._gauges[metric].labels(name=name, job=self._job).set(value)

    def _replace(self) -> None:
        self._written = time.monotonic()
        with replace_file(self._path) as file:
            file.write(self._client.generate_latest(self._registry))

    def _try_to_replace(self) -> None:
        try:
            self._replace()
        except (OSError, ValueError) as error:
            self._client = None
            logs.warning("monitor", f"no more scalars are written: {error}")

    def close(self) -> None:
        """Write the last scalars; a second call does nothing."""
        if self._client is not None:
            self._try_to_replace()
            self._client = None

    def __enter__(self) -> ScalarWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "nothing on this rank" if self._client is None else self._path
        return f"<ScalarWriter: writes {where}>"


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"names must be text, not {validation.shown(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name!r} cannot be the name of a scalar") from None
    return name


def _number(name: str, value: Any) -> float:
    """Return a number, or the element of an array or tensor, as a float."""
    try:
        if not isinstance(value, str | bytes):  # float("1") is 1.0
            return float(value.item() if hasattr(value, "item") else value)
    except Exception:  # libraries of tensors raise errors of many types
        pass
    raise ArgumentTypeError(
        f"{name!r} must be a number, or an array of one element, not "
        f"{validation.shown(value)}"
    )
