"""Analyses of a decomposition: what its components are tuned to."""
