"""Monitoring of jobs: statistics, timeline, report, progress."""
