"""Resilience: exit handling, watchdog, pre-emption, elastic runs."""
