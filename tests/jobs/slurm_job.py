"""A job for the tests of Slurm, in place of jobs/train_digits_resumable.py.

It steps until Slurm has warned all ranks, then they leave with 99, as a job does that
has saved and asks for another run. In that run it ends at once. As its first argument
says, one rank may fail on the way.
"""

from __future__ import annotations

import os
import signal
import sys

import mpidist

strategy = mpidist.MirroredStrategy()
rank = strategy.extended.replica_id
warnings: list[str] = []


def note(number: int, frame: object) -> None:
    """Remember a signal, and tell it."""
    name = signal.Signals(number).name
    if not warnings:
        os.write(1, f"rank {rank} was warned by {name}\n".encode())
    warnings.append(name)


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
for each in SIGNALS:
    signal.signal(each, note)
run = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"rank {rank} is ready in run {run}", flush=True)
if run != "0":
    sys.exit(0)
for step in range(10**9):
    if step == 10 and rank == 1 and "raise" in sys.argv:
        raise KeyError("the reason")
    if step == 10 and rank == 1 and "die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if strategy.reduce("SUM", int(bool(warnings))) == strategy.num_replicas_in_sync:
        break
# Python takes its handlers back on the way out, but lets ignored signals be ignored
for each in SIGNALS:
    signal.signal(each, signal.SIG_IGN)
sys.exit(99)
