"""Communication: who takes part, consensus, transports, collectives."""
