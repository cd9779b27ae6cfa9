"""Public collectives announce each error that escapes from them on one rank alone.

Whatever fails before the ranks compare their calls, from the first line on, is raised
on all: an argument, memory, a signal handler. Without that, the next call of this rank
would match this one of the others.
"""

from __future__ import annotations

import functools
import inspect
import os
import string
import sys
from collections.abc import Callable, Collection
from typing import Any

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.thread_order import tickets
from mpidist.util.last_resort import MoreStack, add_frames


class _Missed:
    """The last error that could not be announced, as the stack was at its limit."""

    error: BaseException | None = None
    find: Callable[[Any], Consensus]
    of: Any
    limit = 0  # of the recursion; 0 if it was not changed

    def leave(self) -> None:
        """Mark its strategy as broken, on all ranks."""
        error, self.error = self.error, None
        limit, self.limit = self.limit, 0
        if limit:
            sys.setrecursionlimit(limit)
        consensus = self.find(self.of)
        self.of = None
        if error is not None and not consensus.is_known(error, -1):
            consensus.mark_broken(error)


_missed = _Missed()


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
    closed = int(method.__name__ == "__exit__")

    def depth(self: Any) -> int:
        return find(self).lock.state.depth - closed

    def escaped(
        self: Any, error: BaseException, since: int | None, depth: int | None
    ) -> None:
        """Announce an error; remove the caller's frame from its traceback."""
        limit = 0
        try:
            limit = add_frames(error)
            if is_local is None or not is_local(self, name):
                _announce(find, self, name, error, since, depth)
            if limit:
                sys.setrecursionlimit(limit)
        except RecursionError:  # nothing can be called here
            _missed.find, _missed.of, _missed.error = find, self, error
            _missed.limit = limit or _missed.limit
        if after is not None:
            after(self, name, error)
        trace = error.__traceback__
        if trace is not None and trace.tb_next is not None:
            # Tracebacks show one frame of this package
            if sys.version_info >= (3, 11):
                BaseException.with_traceback(error, trace.tb_next)
            else:  # it re-raises with the traceback that it caught
                trace.tb_next = trace.tb_next.tb_next

    first, parameters, arguments = _parameters_of(method)
    source = _CALL.substitute(
        depth=f"_depth({first})" if method.__name__ in _SCOPE else "None",
        first=first,
        parameters=parameters,
        arguments=arguments,
    )
    names = {
        **{"_missed": _missed, "_ticket": tickets.__next__, "_depth": depth},
        **{"_find": find, "_method": method, "_escaped": escaped},
    }
    exec(compile(source, FILE, "exec"), names)
    call: Any = names["call"]
    call.__defaults__, call.__kwdefaults__ = method.__defaults__, method.__kwdefaults__
    return functools.wraps(method)(call)


_SCOPE = ("__enter__", "__exit__")
FILE = os.path.join(os.path.dirname(__file__), "text in public_calls.py")
# A text, with the method's own parameters: `*args, **kwargs` take 0.3 us in each call
_CALL = string.Template("""
def call($parameters):
    _since = _before = None
    try:  # a signal handler may raise between any two lines
        if _missed.error is not None:
            _missed.leave()
        _since, _before = _ticket(), $depth
        return _method($arguments)
    except BaseException as _error:
        try:
            _escaped($first, _error, _since, _before)
        except RecursionError:  # as in it
            _missed.find, _missed.of, _missed.error = _find, $first, _error
        raise
""")


def _parameters_of(method: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the first parameter, all as in a `def`, and as in a call of it."""
    parameters, arguments, is_by_name = [], [], False
    signature = inspect.signature(method, follow_wrapped=False)
    for name, parameter in signature.parameters.items():
        stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*"}
        stars[parameter.VAR_KEYWORD] = "**"
        star = stars.get(parameter.kind, "")
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        if is_keyword and not is_by_name:
            parameters.append("*")
        is_by_name = is_by_name or is_keyword or star == "*"
        has_default = parameter.default is not parameter.empty
        parameters.append(star + name + ("=None" if has_default else ""))
        arguments.append(f"{name}={name}" if is_keyword else star + name)
    return parameters[0], ", ".join(parameters), ", ".join(arguments)


def _announce(
    find: Callable[[Any], Consensus],
    of: Any,
    name: str,
    error: BaseException,
    since: int | None,
    depth: int | None,
) -> None:
    """Announce an error; see `Consensus.escaped`; None: that of now."""
    with MoreStack():
        try:
            consensus = find(of)
        except Exception:  # there is none, or no more: this may be the error
            return
        state = consensus.lock.state
        since = state.event if since is None else since
        depth = state.depth if depth is None else depth
        if not depth:
            consensus.lock.free(error)
        consensus.escaped(name, error, since, depth)
