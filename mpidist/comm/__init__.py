"""Communication: who takes part, agreement, transports, collectives."""
