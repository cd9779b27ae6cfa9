"""Memory that lasts: buffers of a rank, and what the ranks of a node share."""
