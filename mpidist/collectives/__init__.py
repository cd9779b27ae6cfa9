"""Reductions and gathers of nests of arrays: what is added up, packed, and moved."""
