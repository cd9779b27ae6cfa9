"""`python -m mpidist COMMAND`, and the entry point of the console script `mpidist`."""

from __future__ import annotations

import sys

from mpidist.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
