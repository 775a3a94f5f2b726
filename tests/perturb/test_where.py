"""Where in the model a vector lives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npeff.perturb.where import by_layer_and_kind, find_places, largest_entries, low_rank, split_name
from tests import tiny


def test_where_it_lives():
    network = tiny.network("gpt2")
    from npeff.models.select import select_parameters

    selection = select_parameters(network)
    generator = torch.Generator().manual_seed(0)
    vector = {m.name: torch.randn(m.shape, generator=generator) * 1e-3 for m in selection.modules}
    module = next(m for m in selection.modules if m.name == "transformer.h.1.mlp.c_fc")
    vector[module.name][5, 7] = 3.0
    vector[module.name][2, -1] = -2.0
    places = {place.module: place for place in find_places(vector, ranks=True)}
    assert places[module.name].share > 0.9
    assert (places[module.name].layer, places[module.name].kind) == (1, "mlp.c_fc")
    assert places[module.name].ranks["1"] == pytest.approx(9 / 13, abs=0.05)
    assert places[module.name].ranks["4"] > 0.99
    largest = largest_entries(selection, vector, 2)
    assert largest[0].parameter == f"{module.name}.weight"
    assert largest[0].index == [7, 5]  # Conv1D keeps its weight as d_in × d_out
    assert largest[1].parameter == f"{module.name}.bias"
    assert largest[1].index == [2]
    layers, kinds, shares = by_layer_and_kind(list(places.values()))
    assert layers == [0, 1]
    assert np.sum(shares) == pytest.approx(1)
    assert shares[1][kinds.index("mlp.c_fc")] == places[module.name].share
    assert split_name("lm_head") == (-1, "lm_head")
    B, A, kept = low_rank(vector[module.name], 0.95)
    assert A.shape[0] == 2
    assert kept > 0.95
    assert B.shape == (module.shape[0], 2)
