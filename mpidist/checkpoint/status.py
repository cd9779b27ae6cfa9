"""What became of objects and file when a checkpoint was restored."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.errors import CheckpointError

__all__ = ["LoadStatus"]


class LoadStatus:
    """What `Checkpoint.restore` returns. Nothing here communicates.

    Args:
      path: of the checkpoint; None if there was none.
      missing: what the objects had, and the file had not.
      unused: what the file had, and the objects had not.
    """

    def __init__(
        self,
        path: str | None,
        missing: Sequence[str] = (),
        unused: Sequence[str] = (),
    ):
        self.path = path
        self.missing = tuple(missing)
        self.unused = tuple(unused)

    def assert_consumed(self) -> LoadStatus:
        """Raise a CheckpointError unless objects and file had the same names.

        Returns itself, as the other methods do.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise CheckpointError(
                f"{self.path} has what no object was restored from: "
                f"{', '.join(self.unused)}"
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raise a CheckpointError unless all objects were restored."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        if self.missing:
            raise CheckpointError(
                f"{self.path} does not have all objects; left as they were: "
                f"{', '.join(self.missing)}"
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raise a CheckpointError if there was no checkpoint."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        return self

    def expect_partial(self) -> LoadStatus:
        """Return itself: here nobody warns of what was not used."""
        return self
