"""A whole small fleet on one machine, simulated engines included."""
