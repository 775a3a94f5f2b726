"""Which model is asked: loading it, selecting its parameters, reading its answers."""
