"""Public collectives announce each error that escapes from them on one rank alone.

Whatever fails before the ranks compare their calls, from the first line on, is raised
on all: an argument, memory, a signal handler. Without that, the next call of this rank
would match this one of the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

from mpidist.comm.consensus.consensus import Consensus
from mpidist.util.last_resort import MoreStack, add_frames


def announce_errors(
    kind: type,
    names: Collection[str],
    find: Callable[[Any], Consensus],
    is_local: Callable[[Any, str], bool] | None = None,
    after: Callable[[Any, str, BaseException], None] | None = None,
) -> None:
    """Make methods of a class announce what escapes from them; see the module.

    Args:
      kind: the class.
      names: of the methods, which it defines itself.
      find: returns the consensus of an object.
      is_local: given an object and a name, whether that call was not collective.
      after: called with an object, a name and an error that was announced.
    """
    for name in names:
        setattr(kind, name, announcing(kind.__dict__[name], find, is_local, after))


def announcing(
    method: Callable[..., Any],
    find: Callable[[Any], Consensus],
    is_local: Callable[[Any, str], bool] | None = None,
    after: Callable[[Any, str, BaseException], None] | None = None,
) -> Any:
    """Return a method, or function, that announces what escapes from it.

    Args:
      method: its first argument is an object.
      find: see `announce_errors`.
      is_local: see there.
      after: see there.
    """
    name = method.__name__.replace("__init__", method.__qualname__.partition(".")[0])
    closed = int(method.__name__ == "__exit__")  # scopes that it ends

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = None
        try:  # a signal handler may raise between any two lines
            if _missed.error is not None:
                _missed.leave()
            state = find(self).lock.state.__dict__
            before = state["events"], state["depth"] - closed
            return method(self, *args, **kwargs)
        except BaseException as error:
            limit = 0
            try:
                limit = add_frames(error)
                if is_local is None or not is_local(self, name):
                    _announce(find, self, name, error, before)
                if limit:
                    sys.setrecursionlimit(limit)
            except RecursionError:  # nothing can be called here
                _missed.find, _missed.of, _missed.error = find, self, error
                _missed.limit = limit
            if after is not None:
                after(self, name, error)
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:
                # Tracebacks show one frame of this package
                if sys.version_info >= (3, 11):
                    BaseException.with_traceback(error, trace.tb_next)
                else:  # it re-raises with the traceback that it caught
                    trace.tb_next = trace.tb_next.tb_next
            raise

    return call


def _announce(
    find: Callable[[Any], Consensus],
    of: Any,
    name: str,
    error: BaseException,
    before: tuple[int, int] | None,
) -> None:
    """Announce an error; `before`: this thread's events and depth, if known."""
    with MoreStack():
        try:
            consensus = find(of)
        except Exception:  # there is none, or no more: this may be the error
            return
        state = consensus.lock.state
        events, depth = before or (state.events, state.depth)
        if not depth:
            consensus.lock.free(error)
        consensus.escaped(name, error, events, depth)


class _Missed:
    """The last error that could not be announced, as the stack was at its limit."""

    error: BaseException | None = None
    find: Callable[[Any], Consensus]
    of: Any
    limit: int  # of the recursion; 0 if it was not changed

    def leave(self) -> None:
        """Mark its strategy as broken, on all ranks."""
        error, self.error = self.error, None
        if self.limit:
            sys.setrecursionlimit(self.limit)
        consensus = self.find(self.of)
        self.of = None
        if error is not None and not consensus.is_known(error, -1):
            consensus.leave(error)


_missed = _Missed()
