"""Reductions and gathers of nested structures of arrays."""
