"""The commands: `mpidist COMMAND`, or `python -m mpidist COMMAND`."""
