"""Per-example Fishers of a model on a task, as sketched rows of gradients."""
