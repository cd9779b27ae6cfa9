"""Transports: they move bytes between ranks, with the interface `Transport`."""
