"""Strategies, their variables, and the contexts of replicas."""
