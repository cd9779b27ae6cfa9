"""Save a checkpoint when a job is about to be ended, and exit for a requeue."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.format import read_header
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.launch.allocations import TimeLimit
from mpidist.launch.launchers import end_signals, time_limit
from mpidist.util import logs, validation
from mpidist.util.forks import call_in_child
from mpidist.util.representation import duration, one_line

T = TypeVar("T")
# With this exit code a job asks to be requeued; the scripts in jobs/ know it
RESTART_EXIT_CODE = 99
_CALL = "PreemptionCheckpointHandler"
_WATCH_SECONDS = 1.0
_MOST_ERRORS = 3  # of the watcher, in a row
# Safety margins for the durations of a save and a step, and what they count where one
# is not known
_CAUTION = 1.5
_MARGIN_SECONDS = 10.0
_UNKNOWN_SECONDS = 60.0
_EVER_SECONDS = 1e9  # longer ones, too, are no limit


@dataclasses.dataclass(frozen=True)
class TerminationConfig:
    """What to do when the job is about to be ended.

    Args:
      termination_watcher_fn: called about once a second by a thread of each rank. True
        means, like a signal, that the job is about to be ended. An exception is logged;
        the third in a row is raised on all ranks, before the next step.
      exit_fn: called on all ranks once the checkpoint is complete; by default the
        program exits with code 99, for which the scripts in `jobs/` requeue. If it
        returns, the handler has done its work, and further steps are not watched.
      grace_period: the seconds from the signal to the end of the job. Training
        continues while another step and a save fit in; by default the current step is
        the last.
      save_fn: called on all ranks instead of the manager's `save`, with the arguments
        of `save_checkpoint_if_preempted`.

    Raises:
      ArgumentError: grace_period < 0.
      ArgumentTypeError: an argument is not a function, or not a number.

    Example:
      >>> mpidist.TerminationConfig(grace_period=30.0).grace_period
      30.0
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            validation.optional_function(name, getattr(self, name))
        if self.grace_period is not None:
            validation.number(
                "grace_period", self.grace_period, ">= 0", " seconds or None"
            )


class PreemptionCheckpointHandler:
    """Save a checkpoint when the job is about to be ended, and exit.

    Creating it is collective, as are all its methods; it restores the latest
    checkpoint.

    After SIGTERM or SIGUSR1 (in LSF and Grid Engine also SIGUSR2) on any rank, all
    ranks save after the same step and exit. The same happens near the end of the job's
    time if Slurm (`SLURM_JOB_END_TIME`, or squeue) or Flux reports it: from the
    durations of steps and saves, it saves after the last step that leaves enough time.
    How long a save took is in the checkpoint, so the next job knows; until then, 60 s
    count. Each job makes at least one step, however little time it has. The log says
    why a job ends.
    This takes one small all-reduce per step, a few microseconds on one node.

    Args:
      cluster_resolver: as in TensorFlow; not used, may be None.
      checkpoint_or_checkpoint_manager: a manager; or a `Checkpoint`, with a
        `checkpoint_dir` or a `save_fn`.
      checkpoint_dir: for a `Checkpoint`: the directory from which to restore the latest
        checkpoint, and in which to save unless there is a `save_fn`. A manager uses its
        own directory.
      termination_config: see `TerminationConfig`.

    Raises, on all ranks:
      ArgumentTypeError: an argument has an invalid type.
      ContextError: not in the main thread, which receives the signals.
      What `CheckpointManager.restore_or_initialize` raises.

    Example:
      >>> with strategy.scope():
      ...     w = mpidist.Variable(0.0, aggregation=mpidist.VariableAggregation.SUM)
      >>> checkpoint = mpidist.Checkpoint(w=w)
      >>> manager = mpidist.CheckpointManager(checkpoint, "run", max_to_keep=2)
      >>> handler = mpidist.PreemptionCheckpointHandler(None, manager)
      >>> for _ in range(3):
      ...     _ = handler.run(strategy.run, lambda: w.assign_add(np.ones(())))
      >>> handler.total_run_calls
      3
      >>> handler.close()
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        given = checkpoint_or_checkpoint_manager
        self._manager = given if isinstance(given, CheckpointManager) else None
        self._directory = checkpoint_dir
        checkpoint = given.checkpoint if isinstance(given, CheckpointManager) else given
        if not isinstance(checkpoint, Checkpoint):
            raise ArgumentTypeError(
                f"{_CALL} needs a CheckpointManager or a Checkpoint, as "
                f"checkpoint_or_checkpoint_manager, not {validation.shown(given)}"
            )
        self._config = TerminationConfig()
        if termination_config is not None:
            self._config = termination_config
        self._group = checkpoint.strategy.extended
        self._group.consensus.run(_CALL, self._check)
        self._checkpoint = checkpoint
        self._former: dict[int, Any] = {}
        self._asked_at: float | None = None
        self._durations = _Durations(0.0, 0.0)
        self._edge: float | None = None
        self._checks = 0  # whether to end
        self._is_closed = False
        self._has_ended = False  # all ranks have saved, and exit_fn was called
        self._watcher_errors: list[BaseException] = []  # the last ones in a row
        self._limit: TimeLimit = self._group.consensus.root_only(
            _CALL, lambda: time_limit(os.environ)
        )
        if self._manager is None and self._config.save_fn is None:
            assert checkpoint_dir is not None
            self._manager = CheckpointManager(checkpoint, checkpoint_dir, max_to_keep=1)
        path = self._restore_latest()
        # A checkpoint saved without a handler lacks it
        counted = Checkpoint(strategy=checkpoint.strategy, total_run_calls=0)
        if path is not None:
            counted.restore(path, is_partial=True)
            milliseconds = self._group.consensus.root_only(
                _CALL, lambda: read_header(Path(path)).milliseconds
            )
            self._durations = _Durations(0.0, milliseconds / 1000)
        checkpoint.total_run_calls = counted.total_run_calls
        self._listen()

    def __repr__(self) -> str:
        def describe() -> str:
            asked = "exit requested" if self._asked_at else "watching"
            return "closed" if self._is_closed else asked

        return one_line(self, describe)

    def _check(self) -> None:
        validation.instance("termination_config", self._config, TerminationConfig)
        if isinstance(self._directory, TerminationConfig):
            raise ArgumentTypeError(
                "checkpoint_dir must be a path, not a TerminationConfig: that is the "
                "fourth argument, termination_config"
            )
        if self._directory is not None:
            validation.path("checkpoint_dir", self._directory)
        elif self._manager is None and self._config.save_fn is None:
            raise ArgumentTypeError(
                f"{_CALL} needs a CheckpointManager, or for a Checkpoint a "
                "checkpoint_dir or a save_fn"
            )
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                f"create {_CALL} in the program's main thread, which receives the "
                "signals"
            )

    def _restore_latest(self) -> str | None:
        """Restore the latest checkpoint; return its path. Collective."""
        if self._manager is not None:
            return self._manager.restore_or_initialize()
        directory = self._directory
        if directory is None:
            return None
        path: str | None = self._group.consensus.root_only(
            _CALL, lambda: latest_checkpoint(directory)
        )
        self._checkpoint.restore(path)
        return path

    def _listen(self) -> None:
        _handlers.add(self)
        for number in end_signals(os.environ):
            self._former[number] = signal.signal(number, self._note_signal)
        if self._config.termination_watcher_fn is not None:
            watcher = threading.Thread(
                target=self._watch, name="watch-termination", daemon=True
            )
            watcher.start()

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()

    def _watch(self) -> None:
        asks = self._config.termination_watcher_fn
        while asks is not None and not self._is_closed and self._asked_at is None:
            try:
                if asks():
                    self._asked_at = time.monotonic()
                self._watcher_errors = []
            except BaseException as error:  # tried again: a server may be busy
                text = f"termination_watcher_fn raised {type(error).__name__}: {error}"
                logs.warning("resilience", f"{_CALL}: {text}")
                self._watcher_errors = [*self._watcher_errors, error]
                if len(self._watcher_errors) == _MOST_ERRORS:
                    return
            time.sleep(_WATCH_SECONDS)

    @property
    def total_run_calls(self) -> int:
        """How many times `run` has called its function, including earlier jobs."""
        return int(self._checkpoint.total_run_calls)

    def run(
        self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """Return `distributed_train_function(*args, **kwargs)`: a step. Collective.

        If the job is about to be ended, saves and exits before the step.
        """
        self._before_step()
        result = distributed_train_function(*args, **kwargs)
        self._checkpoint.total_run_calls = self.total_run_calls + 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save and exit if the job is about to be ended. Collective, between steps.

        Args:
          args: for `save_fn`.
          kwargs: for `save_fn`.

        Raises, on all ranks: what saving raises.
        """
        self._end_if_due(True, *args, **kwargs)

    def _before_step(self) -> None:
        """Save and exit if the job is about to be ended, but make one step at least."""
        self._end_if_due(self._checks > 0)

    def _end_if_due(self, counts_limit: bool, *args: Any, **kwargs: Any) -> None:
        if self._has_ended:
            return
        now = time.monotonic()
        if self._edge is not None:
            step = max(self._durations.step, now - self._edge)
            self._durations = self._durations._replace(step=step)
        self._edge = now
        self._checks += 1
        left, is_asked, has_failed = self._agree(now, counts_limit)
        if left >= self._durations.needed():
            if has_failed:
                self._group.consensus.run(_CALL, self._require_watcher)
            return
        self._log_end(left, is_asked)
        path = self._group.consensus.run(_CALL, lambda: self._save(*args, **kwargs))
        if self._group.replica_id == 0:
            ends = f"the job exits with {RESTART_EXIT_CODE}, to be started again"
            if self._config.exit_fn is not None:
                ends = "exit_fn ends the job"
            logs.info("resilience", f"saved {path}; {ends}")
        if self._config.exit_fn is None:
            # A late signal must not end this rank differently while it exits
            for number in self._former:
                signal.signal(number, signal.SIG_IGN)
            sys.exit(RESTART_EXIT_CODE)
        self._has_ended = True
        self.close()
        self._config.exit_fn()

    def _require_watcher(self) -> None:
        if len(self._watcher_errors) == _MOST_ERRORS:
            raise self._watcher_errors[-1]

    def _save(self, *args: Any, **kwargs: Any) -> str:
        """Save; return where. Collective."""
        path: str | None = "by save_fn"
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        if self._manager is not None:
            if self._config.save_fn is None:
                path = self._manager.save(check_interval=False)
            self._manager.wait()
        return str(path)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Save and exit between the calls of `Strategy.run` in a `with` block.

        All ranks enter and leave it.
        """
        former = self._group.before_run
        self._group.before_run = self._before_step
        try:
            yield
        finally:
            self._group.before_run = former

    def _agree(self, now: float, counts_limit: bool) -> tuple[float, bool, bool]:
        """Return the seconds left, and on any rank: a signal, a failed watcher.

        The durations become the longest of all ranks, and only rank 0 knows the limit.
        Collective.
        """
        left = math.inf
        if self._asked_at is not None:
            left = self._asked_at + (self._config.grace_period or 0.0) - now
        if counts_limit and self._group.replica_id == 0:
            left = min(left, self._limit.end - time.time())
        step, save = self._durations
        if self._manager is not None:
            save = max(save, self._manager.longest_save_seconds)
        mine = [_milliseconds(x) for x in (-left, step, save)]
        mine.append(self._asked_at is not None)
        mine.append(len(self._watcher_errors) == _MOST_ERRORS)
        found = self._group.reduce_own(_CALL, "MAX", np.array(mine, np.int64)).tolist()
        self._durations = _Durations(found[1] / 1000, found[2] / 1000)
        return -found[0] / 1000, bool(found[3]), bool(found[4])

    def _log_end(self, left: float, is_asked: bool) -> None:
        if self._group.replica_id > 0:
            return
        what = "a signal or the watcher of a rank asks for it"
        if not is_asked:
            seconds = f"{max(0.0, left):.0f} s"
            what = f"its time limit ({self._limit.source}) is reached in {seconds}"
        text = f"{_CALL} saves and ends the job: {what}; {self._durations}"
        if self._checks > 2 or is_asked:
            logs.info("resilience", text)
        else:
            advice = "It has made one step at most: give the job more time"
            logs.warning("resilience", f"{text}. {advice}")

    def close(self) -> None:
        """Stop handling signals; a second call does nothing. Not collective."""
        self._is_closed = True
        while self._former:
            number, former = self._former.popitem()
            if signal.getsignal(number) == self._note_signal:
                signal.signal(number, former)
            for other in _handlers:  # one that was made later would restore this one
                if other._former.get(number) == self._note_signal:
                    other._former[number] = former


_handlers: weakref.WeakSet[PreemptionCheckpointHandler] = weakref.WeakSet()


def _forget_signals() -> None:
    """Let signals end a forked process: it is no rank, and saves nothing."""
    for handler in list(_handlers):
        handler.close()


call_in_child(_forget_signals)


class _Durations(NamedTuple):
    """The longest step, and the longest save, in seconds; 0 if unknown."""

    step: float
    save: float

    def needed(self) -> float:
        """Return the time that a step and a save need, with a margin."""
        unknown = 0.0 if self.step and self.save else _UNKNOWN_SECONDS
        return _CAUTION * (self.step + self.save + unknown) + _MARGIN_SECONDS

    def __str__(self) -> str:
        step, save = (duration(seconds) if seconds else "unknown" for seconds in self)
        return (
            f"a step ({step}) and a save ({save}) need {duration(self.needed())} with "
            "a margin"
        )


def _milliseconds(seconds: float) -> int:
    """Return a duration rounded up, for comparison by all ranks."""
    return math.ceil(1000 * min(max(seconds, -_EVER_SECONDS), _EVER_SECONDS))
