"""How ranks make sure that they do the same, and fail together where they do not."""
