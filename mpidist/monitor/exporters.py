"""Scalars by name, for TensorBoard and for Prometheus.

    pip install tensorboardX prometheus_client

installs the two packages for the formats. `import mpidist` does not import this.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import socket
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

__all__ = ["ScalarWriter"]

_OPEN = "ScalarWriter"
_STEP = "step"  # its gauge
_LEAST_SECONDS = 1.0  # between two versions of a Prometheus textfile
_NO_PACKAGE = "{0} needs {1}, which is not installed: pip install {1}"


class _HasGroup(Protocol):
    """A strategy, whose package is above this one."""

    @property
    def extended(self) -> ReplicaGroup: ...


class _Exporter(Protocol):
    """Writes scalars in one format. Any method may raise an OSError."""

    def write(self, scalars: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class ScalarWriter:
    """Writes scalars by name, on rank 0, for TensorBoard or Prometheus.

    Creating one is collective. `write` is not: all ranks may call it, or only rank 0;
    only rank 0 writes. If a file cannot be written later (a full disk), the log has a
    warning and the job continues without that file.

    Args:
      strategy: of the job.
      tensorboard: a folder for TensorBoard's event files; created if missing.
      prometheus: a file for the textfile collector of Prometheus' node exporter, whose
        name ends in ".prom"; it is replaced atomically, at most once a second. The
        scalar "loss/train" is the gauge
        `mpidist_loss_train{name="loss/train", job="..."}`, and `mpidist_step` is the
        last step; a scalar "step" is the gauge `mpidist_scalar_step`.
      job: a label of all gauges.

    Raises, on all ranks:
      ArgumentError: neither path is given, or the file does not end in ".prom".
      ArgumentTypeError: a path is not a path, or `job` not text.
      UnsupportedError: the package is not installed on rank 0.
      OSError: the folder or the file cannot be created.

    Example:
      >>> from mpidist.monitor.exporters import ScalarWriter
      >>> with ScalarWriter(strategy, prometheus="job.prom", job="digits") as scalars:
      ...     scalars.write({"loss": 0.5}, step=1)
    """

    def __init__(
        self,
        strategy: _HasGroup,
        *,
        tensorboard: str | os.PathLike[str] | None = None,
        prometheus: str | os.PathLike[str] | None = None,
        job: str = "",
    ):
        group = strategy.extended
        group.topology.require_open()
        self._is_writing = group.replica_id == 0
        self._exporters: list[_Exporter] = []

        def check() -> tuple[Path | None, Path | None]:
            validation.instance("job", job, str)
            paths = _path("tensorboard", tensorboard), _path("prometheus", prometheus)
            if paths == (None, None):
                raise ArgumentError(f"{_OPEN} needs tensorboard=, prometheus=, or both")
            if paths[1] is not None and paths[1].suffix != ".prom":
                raise ArgumentError(
                    "prometheus must end in .prom, the only files that the node "
                    f"exporter reads, not {paths[1].name!r}"
                )
            return paths

        folder, file = group.consensus.guard(_OPEN, check)
        group.consensus.sync_errors(_OPEN, None)  # before files are created

        def open_all() -> None:
            if folder is not None:
                self._exporters.append(_TensorBoard(folder))
            if file is not None:
                self._exporters.append(_Prometheus(file, job))

        group.consensus.root_only(_OPEN, open_all)

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
        for exporter in list(self._exporters):
            try:
                exporter.write(numbers, step)
            except (OSError, ValueError) as error:
                self._go_without(exporter, error)

    def close(self) -> None:
        """Flush and close the files; a second call does nothing."""
        exporters, self._exporters = self._exporters, []
        for exporter in exporters:
            try:
                exporter.close()
            except (OSError, ValueError) as error:
                logs.warning("monitor", f"some scalars were not written: {error}")

    def _go_without(self, exporter: _Exporter, error: Exception) -> None:
        self._exporters.remove(exporter)
        with contextlib.suppress(OSError, ValueError):
            exporter.close()
        logs.warning("monitor", f"no more scalars are written: {error}")

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
        kinds = ", ".join(type(e).__name__.strip("_") for e in self._exporters)
        return f"<ScalarWriter: {kinds or 'writes nothing on this rank'}>"


def _path(argument: str, value: Any) -> Path | None:
    return None if value is None else validation.absolute(argument, value)


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


class _TensorBoard:
    """Appends events to a file.

    Writes in this thread: tensorboardX's SummaryWriter uses another thread, and waits
    for ever after a full disk has ended it.
    """

    def __init__(self, folder: Path):
        try:
            from tensorboardX.proto import event_pb2, summary_pb2
            from tensorboardX.record_writer import RecordWriter
        except ImportError:
            text = _NO_PACKAGE.format("TensorBoard's format", "tensorboardX")
            raise UnsupportedError(text) from None
        folder.mkdir(parents=True, exist_ok=True)
        # Not to be guessed by others, who could put a link there
        where = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        unique = f"{time.time():.0f}.{where}"
        self._records = RecordWriter(str(folder / f"events.out.tfevents.{unique}"))
        self._Event, self._Summary = event_pb2.Event, summary_pb2.Summary
        self._append(wall_time=time.time(), file_version="brain.Event:2")

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        values = [
            self._Summary.Value(tag=name, simple_value=x) for name, x in scalars.items()
        ]
        summary = self._Summary(value=values)
        self._append(wall_time=time.time(), step=step, summary=summary)

    def _append(self, **fields: Any) -> None:
        self._records.write(self._Event(**fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        self._records.close()


class _Prometheus:
    """Replaces a file of gauges."""

    def __init__(self, path: Path, job: str):
        try:
            import prometheus_client
        except ImportError:
            text = _NO_PACKAGE.format("Prometheus' format", "prometheus_client")
            raise UnsupportedError(text) from None
        self._path, self._job = path, job
        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write_file()
        self._written = -math.inf  # write the first scalars at once

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        for name, x in scalars.items():
            gauge = self._gauge(f"scalar_{_STEP}" if name == _STEP else name)
            gauge.labels(name=name, job=self._job).set(x)
        self._gauge(_STEP).labels(name=_STEP, job=self._job).set(step)
        if time.monotonic() - self._written >= _LEAST_SECONDS:
            self._write_file()

    def _gauge(self, name: str) -> Any:
        """Return the gauge of a name; names that differ only in signs share one."""
        metric = "mpidist_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if metric not in self._gauges:
            help_text = "scalar of an mpidist job"
            self._gauges[metric] = self._client.Gauge(
                metric, help_text, ["name", "job"], registry=self._registry
            )
        return self._gauges[metric]

    def _write_file(self) -> None:
        self._written = time.monotonic()
        with replace_file(self._path) as file:
            file.write(self._client.generate_latest(self._registry))

    def close(self) -> None:
        self._write_file()
