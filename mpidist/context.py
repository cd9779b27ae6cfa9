"""Replica and cross-replica contexts: which strategy and which replica is current.

Each thread has its own stack of contexts. At any time exactly one of the two kinds is
current. The bottom of the stack is the replica context of the default strategy.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.util import validation
from mpidist.util.representation import one_line

if TYPE_CHECKING:
    from mpidist.strategy.replica_context import ReplicaContext
    from mpidist.strategy.strategy import Strategy


class Frame(NamedTuple):
    """One entry of the stack; without a replica context it is cross-replica.

    Args:
      strategy: the current one.
      replica: the current replica's context; None in cross-replica context.
      is_update: whether a function passed to `StrategyExtended.update` is running.
      is_default_scope: whether the default strategy's scope was entered, in which no
        other strategy's scope can be entered.
    """

    strategy: Strategy
    replica: ReplicaContext | None
    is_update: bool = False
    is_default_scope: bool = False

    def is_replica_of(self, strategy: Strategy) -> bool:
        """Return whether it is a replica context of this strategy."""
        return self.replica is not None and self.strategy is strategy


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.base: Frame | None = None
        self.had_no_replica = False  # `get_replica_context` has returned None


_stack = _Stack()
_default: list[Strategy] = []
_default_replica: list[ReplicaContext] = []
_default_frame: list[Frame] = []


def current() -> Frame:
    """Return the current context."""
    frames = _stack.frames
    return frames[-1] if frames else _stack.base or _default_frame[0]


def frame_for(strategy: Strategy, name: str) -> Frame:
    """Return the current context, in which a variable changes.

    Args:
      strategy: under which the variable was created.
      name: the variable's.

    Raises:
      ContextError: another strategy than `strategy`, or the default one, is current.
    """
    frames = _stack.frames
    frame = frames[-1] if frames else current()
    if frame.strategy is not strategy and frame.strategy is not _default[0]:
        raise ContextError(
            f"Mixing different tf.distribute.Strategy objects: {name} of {strategy!r} "
            f"was changed under {frame.strategy!r}. Create variables inside `with "
            "strategy.scope():`"
        )
    return frame


def set_default_strategy(strategy: Strategy, replica: ReplicaContext) -> None:
    """Set the default strategy (one replica), which is current outside all scopes."""
    _default[:] = [strategy]
    _default_replica[:] = [replica]
    _default_frame[:] = [Frame(strategy, replica)]


def default_strategy() -> Strategy:
    """Return the default strategy."""
    return _default[0]


def get_strategy() -> Strategy:
    """Return the current strategy: the default one (one replica) outside all scopes.

    Example:
      >>> strategy.run(lambda: mpidist.get_strategy() is strategy).values
      (True,)
    """
    return current().strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    Example:
      >>> mpidist.has_strategy(), strategy.run(mpidist.has_strategy).values
      (False, (True,))
    """
    return get_strategy() is not _default[0]


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` current in this thread, as if all code were in its scope.

    None makes the default strategy current again. Not collective. Raises ContextError
    inside a scope or a replica function, and ArgumentTypeError if `strategy` is not a
    Strategy.

    Example:
      >>> mpidist.experimental_set_strategy(strategy)
      >>> mpidist.experimental_set_strategy(None)  # the default one again
    """
    if _stack.frames:
        raise ContextError(
            "experimental_set_strategy was called inside a strategy's scope; call it "
            "at the top level of the program"
        )
    if strategy is not None and not hasattr(strategy, "extended"):
        raise ArgumentTypeError(
            f"strategy must be a Strategy or None, not {validation.shown(strategy)}"
        )
    is_default = strategy is None or strategy is _default[0]
    _stack.base = None if strategy is None or is_default else Frame(strategy, None)


# It is None in cross-replica context. The type is Any because mypy cannot know which
# context is current: every function passed to `run` would need an assertion
def get_replica_context() -> ReplicaContext | Any:
    """Return the current replica's context, None in cross-replica context.

    Outside all scopes it is the context of the default strategy: replica 0 of 1. In a
    job of several ranks, its collectives raise ContextError there: they would reduce
    over one process only.

    Example:
      >>> strategy.run(mpidist.get_replica_context).values  # on replica 0
      (<ReplicaContext of replica 0 of 2>,)
    """
    replica = current().replica
    if replica is None:
        _stack.had_no_replica = True
    return replica


def explain(error: BaseException | None) -> None:
    """Add advice to an AttributeError that comes from using None as a replica context.

    `get_replica_context` returns that None in cross-replica context.
    """
    if not isinstance(error, AttributeError) or error.obj is not None:
        return
    name = error.name or ""
    is_known = not name.startswith("_") and hasattr(_default_replica[0], name)
    hint = "get_replica_context() is None"
    if is_known and _stack.had_no_replica and hint not in str(error):
        error.args = (
            f"{error}: {hint} in cross-replica context (in strategy.scope, and in "
            "functions passed to merge_call and update). Use it in a function that "
            "strategy.run runs; here, strategy.reduce and strategy.gather",
        )


def in_cross_replica_context() -> bool:
    """Return whether the current context is cross-replica.

    It is in `Strategy.scope`, and in functions passed to `merge_call` and `update`.

    Example:
      >>> strategy.run(mpidist.in_cross_replica_context).values
      (False,)
    """
    return current().replica is None


def in_replica_function() -> bool:
    """Return whether a function passed to `run` is running, outside `merge_call`."""
    frames = _stack.frames  # without a call of `current`
    top = frames[-1] if frames else _stack.base or _default_frame[0]
    return top.replica is not None and top.strategy is not _default[0]


def in_replica_of(strategy: Strategy) -> bool:
    """Return whether the current context is a replica context of this strategy."""
    return current().is_replica_of(strategy)


def is_current(replica: ReplicaContext) -> bool:
    """Return whether this replica context is the current one."""
    frames = _stack.frames  # without a call of `current`
    top = frames[-1] if frames else _stack.base or _default_frame[0]
    return top.replica is replica


def depth() -> int:
    """Return the number of contexts on this thread's stack, for `restore`."""
    return len(_stack.frames)


def restore(depth: int) -> None:
    """Pop contexts that an exception of a signal handler has left on the stack."""
    del _stack.frames[depth:]


class enter:  # noqa: N801 (reads as a verb in a with statement)
    """Push a context on this thread's stack for the duration of a block.

    It can be reused and nested: it has no state of its own.
    """

    __slots__ = ("_frame",)

    def __init__(
        self,
        strategy: Strategy,
        replica: ReplicaContext | None = None,
        is_update: bool = False,
    ):
        self._frame = Frame(strategy, replica, is_update)

    def __enter__(self) -> None:
        _stack.frames.append(self._frame)

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            explain(error)
        frames = _stack.frames
        if not frames or frames[-1] is not self._frame:
            raise ContextError("scope nesting error: an inner scope was not left first")
        frames.pop()


def require_cross_replica(strategy: Strategy, call: str) -> None:
    """Raise ContextError unless in the strategy's cross-replica or default context."""
    frames = _stack.frames  # without a call of `current`
    top = frames[-1] if frames else _stack.base or _default_frame[0]
    if top.strategy is _default[0]:
        return
    if top.strategy is strategy:
        if top.replica is not None:
            raise ContextError(
                f"{call} was called in replica context, inside a function that "
                "strategy.run runs; it needs cross-replica context: call it outside, "
                "or from a function passed to get_replica_context().merge_call"
            )
    else:
        _refuse_mixing(call, strategy, top.strategy)


def _refuse_mixing(call: str, strategy: Strategy, current: Strategy) -> NoReturn:
    raise ContextError(
        f"Mixing different tf.distribute.Strategy objects: {call} of {strategy!r} was "
        f"called under {current!r}"
    )


class Scope(threading.local):
    """What `Strategy.scope` returns; it can be reused and nested.

    The scope of the default strategy changes nothing if that strategy is current.

    Each thread has its own `_entered`, as it has its own stack.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
        self._entered: list[Frame] = []

    def __repr__(self) -> str:
        return one_line(self, lambda: f"of {self._strategy!r}")

    def __enter__(self) -> Strategy:
        if self._strategy is _default[0] is current().strategy:
            frame = current()._replace(is_default_scope=True)
        else:
            require_cross_replica(self._strategy, "scope")
            if any(former.is_default_scope for former in _stack.frames):
                _refuse_mixing("scope", self._strategy, _default[0])
            frame = Frame(self._strategy, None)
        _stack.frames.append(frame)
        self._entered.append(frame)
        return self._strategy

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            explain(error)
        frame = self._entered.pop()
        is_innermost = bool(_stack.frames) and _stack.frames[-1] is frame
        _stack.frames[:] = [f for f in _stack.frames if f is not frame]
        if not is_innermost:
            raise ContextError(
                f"scope nesting error: the scope of {self._strategy!r} is not the one "
                "entered last; leave scopes in the reverse order"
            )
