"""Datasets whose rows are divided over replicas."""
