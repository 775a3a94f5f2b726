"""npeff: which heuristics does this language model use on my task?"""

__version__ = "0.1.0"
