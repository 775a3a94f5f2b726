from tests.perturb.conftest import held_run, one_thread, run  # noqa: F401
