"""Learning dynamics in closed form: how training moves at small starts, and where it ends with endless data."""
