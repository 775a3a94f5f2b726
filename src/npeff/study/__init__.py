"""Blind studies of components: do people, or a language model, see a theme in their top examples?

`make` writes forms with groups of top and of random examples, `judge` lets a language model fill one in, `score` says
what came out.
"""
