"""Jobs that end well, or go on: exit handling, watchdog, pre-emption, elastic runs."""
