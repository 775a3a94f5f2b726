"""From a component back to the model's parameters: lifting, compressed sensing, and what a perturbation does."""
