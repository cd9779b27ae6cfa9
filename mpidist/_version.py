"""The version, in a separate module so that the build need not import the package."""

__version__ = "0.1.0"
