import torch

from npeff.decompose.initial import spread_out


def test_kmeans_plus_plus_spreads_out():
    vectors = torch.eye(4).repeat_interleave(25, dim=0)
    vectors[::2] *= -1  # the sign of a direction means nothing
    chosen = spread_out(vectors, 4, torch.Generator().manual_seed(0))
    assert sorted((chosen // 25).tolist()) == [0, 1, 2, 3]
    assert len(set(spread_out(vectors, 10, torch.Generator().manual_seed(0)).tolist())) == 10
