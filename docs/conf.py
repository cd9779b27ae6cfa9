"""Settings of the manual. `.ci/manual` builds it."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from public_names import public_members, public_names  # noqa: E402
from sphinx.ext.autodoc.mock import _MockObject  # noqa: E402

import mpidist  # noqa: E402
from mpidist.comm.consensus import public_calls  # noqa: E402

# Signatures are evaluated where a method is defined, not where it is wrapped
PUBLIC_TYPES = [kind for kind in public_names().values() if isinstance(kind, type)]
for kind in {base for public in PUBLIC_TYPES for base in public.__mro__}:
    for name, method in list(vars(kind).items()):
        code = getattr(method, "__code__", None)
        if code is not None and code.co_filename == public_calls.FILE:
            setattr(kind, name, method.__wrapped__)

project = "mpidist"
author = "The mpidist authors"
release = version = mpidist.__version__
html_title = f"mpidist {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "_templates"]
templates_path = [str(Path(__file__).with_name("_templates"))]
myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3
# `py` is Python that is not executed by the tests, `python` is
highlight_language = "none"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_copy_source = html_show_sourcelink = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
# Beside a page there is no room for "Strategy.broadcast()", and its class is above it
toc_object_entries_show_parents = "hide"

# Docstrings have single backticks around code
default_role = "literal"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"undoc-members": True}
autosummary_context = {"public_members": public_members}
suppress_warnings = ["config.cache"]  # of this function, which cannot be pickled
autodoc_class_signature = "mixed"
# The reference is the same whether these are installed or not
FRAMEWORKS = ("torch", "jax", "keras")
autodoc_mock_imports = [n for n in FRAMEWORKS if not importlib.util.find_spec(n)]
# Sphinx's stand-ins lack what mpidist.jax does with a table of JAX when it is imported
_MockObject.__setitem__ = lambda *_: None  # type: ignore[attr-defined]
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
nitpicky = True
linkcheck_timeout = 20
linkcheck_retries = 2

PUBLIC = set(mpidist.__all__)


def resolve_type(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a type in a signature to its public name, and leave others as text.

    Signatures name types by the modules that define them, such as
    `mpidist.strategy.variables.Variable`; the reference has `mpidist.Variable`.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    name = target.rpartition(".")[2]
    if name in PUBLIC and target != f"mpidist.{name}":
        python = env.get_domain("py")
        found = python.resolve_xref(
            env, node["refdoc"], app.builder, "class", f"mpidist.{name}", node, content
        )
        return found if found is not None else content
    is_written_in_full = target.startswith("mpidist.") and target.count(".") == 1
    return None if is_written_in_full else content


def _raises(head: str, block: list[str]) -> list[str]:
    """Return a field with an item for each exception; `head` may say on which ranks."""
    items: list[str] = []
    for line in filter(None, map(str.rstrip, block)):
        if line[2:3] == " " and items:
            items[-1] += " " + line.strip()
        else:
            items.append(line.strip())
    written = []
    for item in items:
        names, colon, text = item.partition(": ")
        for name in PUBLIC if colon else ():
            names = re.sub(rf"\b{name}\b", f":py:exc:`~mpidist.{name}`", names)
        written.append(f"    * {names}{colon and ': '}{text}")
    return [f":{head}:", *written, ""]


def to_restructured_text(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Write as reStructuredText what docstrings have and napoleon does not know."""
    result: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        i += 1
        is_raises = re.fullmatch(r"(Raises\b.*):", line)
        is_code = line.startswith("    ") and len(result) > 1 and not result[-1]
        if is_raises:
            block = []
            while i < len(lines) and (not lines[i] or lines[i].startswith(" ")):
                block.append(lines[i])
                i += 1
            result += ["", *_raises(is_raises[1], block)]
        elif is_code and result[-2][:1].strip() and not result[-2].endswith("::"):
            result += [".. code-block:: python", "", line]
            while i < len(lines) and (not lines[i] or lines[i].startswith(" ")):
                result.append(lines[i])
                i += 1
        elif line.startswith("Example, "):
            result += [f".. rubric:: {line.removesuffix(':')}", ""]
            while i < len(lines) and (not lines[i] or lines[i].startswith(" ")):
                result.append(lines[i].removeprefix("  "))
                i += 1
        else:
            result.append(line)
    lines[:] = result


def setup(app: Any) -> None:
    """Register what is above. For Sphinx."""
    # A checkout without tutorials is fine
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(
        lambda record: "glob pattern" not in record.msg
    )
    # Before napoleon, whose priority is 500
    app.connect("autodoc-process-docstring", to_restructured_text, priority=400)
    app.connect("missing-reference", resolve_type)
