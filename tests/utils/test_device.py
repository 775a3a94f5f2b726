"""Where to compute."""

import pytest
import torch

from npeff.utils.device import choose_device
from npeff.utils.errors import UserError


def test_refuses_a_device_that_is_not_there():
    with pytest.raises(UserError, match="Device 'nonsense' cannot be used here"):
        choose_device("nonsense")


def test_auto_never_takes_a_device_without_float64_where_it_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto", double=True) == torch.device("cpu")
