"""Memory that the ranks of a node share, on the host."""
