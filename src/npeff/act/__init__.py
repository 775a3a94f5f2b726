"""Use what was found: steer a model along a component, repair it with a few of them, compare it with another one."""
