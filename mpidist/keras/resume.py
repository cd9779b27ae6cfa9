"""A callback that saves a job of Keras, and lets it go on in the middle of an epoch."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
from keras import ops

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.errors import ContextError
from mpidist.keras import compat
from mpidist.resilience.preemption import (
    PreemptionCheckpointHandler,
    TerminationConfig,
)


class Resume(keras.callbacks.Callback):
    """Lets `fit` go on where an earlier job has ended, on any number of ranks.

    In place of BackupAndRestore: the weights, the optimizer, the metrics of the epoch
    so far and the place in the input are saved by a `CheckpointManager`, and restored
    when `fit` begins. When the job is about to be ended, it saves and exits: see
    `PreemptionCheckpointHandler`. The state of other callbacks is not saved.

    Args:
      directory: of the checkpoints, which all ranks see.
      every: save after so many batches; also after each epoch.
      max_to_keep: how many checkpoints to keep.

    Example:
      >>> model = keras.Sequential([keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> model = mpidist.keras.distribute(model, strategy)
      >>> rows = mpidist.Dataset.from_tensor_slices((np.ones((8, 1)), np.ones(8)))
      >>> for epochs in (2, 3):  # the second call goes on after epoch 2
      ...     resume = mpidist.keras.Resume("run")
      ...     model.fit(rows.batch(4), epochs=epochs, callbacks=resume, verbose=0).epoch
      [0, 1]
      [2]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int = 100,
        max_to_keep: int | None = 2,
    ):
        super().__init__()
        self.directory, self.every, self.max_to_keep = directory, every, max_to_keep
        self._handler: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the latest checkpoint. Collective."""
        self._ranks: Any = getattr(self.model, "_mpidist", None)
        if self._ranks is None:
            raise ContextError("Resume: call mpidist.keras.distribute(model) first")
        self._variables = self._ranks.variables()
        self._epoch = self._batch = self._first_batch = self._saved_batch = 0
        self._metrics: Any = None
        self._saved = Checkpoint(strategy=self._ranks.strategy, **self._state({}))
        manager = CheckpointManager(self._saved, self.directory, self.max_to_keep)
        self._manager = manager
        config = TerminationConfig(save_fn=self._save)
        self._handler = PreemptionCheckpointHandler(None, manager, None, config)
        if not self._saved.position:
            return
        self._ranks.load(self._variables, self._saved.variables)
        compat.begin_at(self.model, int(self._saved.epoch))
        self._first_batch, steps = int(self._saved.batch), self.params["steps"]
        left = steps - self._first_batch if steps and self._first_batch else None
        self._ranks.data.go_on(dict(self._saved.position), left)
        self._metrics = self._saved.metrics if self._first_batch else None

    def _state(self, position: dict[str, int]) -> dict[str, Any]:
        """Return what is saved, equal on all ranks. Collective."""
        strategy, metrics = self._ranks.strategy, self.model.metrics_variables
        call = "the metrics of Resume"
        sums = compat.ranks.all_sum(strategy, call, [v.value for v in metrics])
        return {
            "variables": self._ranks.values(self._variables),
            "metrics": [np.array(ops.convert_to_numpy(total)) for total in sums],
            "position": position,
            "epoch": self._epoch,
            "batch": self._batch,
        }

    def _save(self) -> None:
        compat.synchronize(self.model)
        data = self._ranks.data
        at = dict(data.iterator.get_state()) if self._batch else data.next_epoch()
        for name, value in self._state(at).items():
            setattr(self._saved, name, value)
        self._manager.save()
        self._saved_batch = self._batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Let metrics go on with what they were before the interruption."""
        self._epoch, self._batch = epoch, self._first_batch
        for variable, total in zip(self.model.metrics_variables, self._metrics or ()):
            is_first = self._ranks.strategy.is_first
            variable.assign(total if is_first else np.zeros_like(total))
        self._metrics = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is time to. Collective."""
        self._batch = self._first_batch + batch + 1
        if self._batch == self.params["steps"]:
            return  # the end of the epoch is saved
        if self._batch - self._saved_batch >= self.every:
            self._save()
        self._handler.save_checkpoint_if_preempted()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save. Collective."""
        self._epoch, self._batch, self._first_batch = epoch + 1, 0, 0
        self._save()
        self._handler.save_checkpoint_if_preempted()

    def close(self) -> None:
        """Handle signals no more."""
        if self._handler is not None:
            self._handler.close()
            compat.begin_at(self.model, None)
