"""Sketches: linear maps from parameter space to p numbers, defined by a seed alone."""
