"""Communication: communicators, consensus, transports, collectives."""
