"""What a job does: statistics, timeline, report, progress."""
