"""Use what was found: steer a model along a component, compare it with another one."""
