import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """The matrices are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
