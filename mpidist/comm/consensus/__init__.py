"""How ranks check that they make the same call, and fail together otherwise."""
