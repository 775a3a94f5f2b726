"""`npeff check` of models in half precision that are sure of their answers."""

from __future__ import annotations

import json

import pytest
import torch

from npeff.collect.check import check
from npeff.collect.config import CheckConfig, CheckedData
from npeff.models.answers import AnswerModel
from npeff.models.config import ModelOptions
from npeff.utils.errors import UserError


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_certain_answers_are_no_error(config, monkeypatch, dtype):
    logits = AnswerModel.logits

    def confident(self, prompts):
        z, places = logits(self, prompts)
        return z - z.detach() + torch.tensor([0.0, -24.0]), places  # directions of length 1e-5

    monkeypatch.setattr(AnswerModel, "logits", confident)
    data, options = CheckedData(data=config.data.data), ModelOptions(dtype=dtype)
    report = check(CheckConfig(config.model.model, "sst2", 4, data, options, sketch=config.sketch))
    assert report.fits
    assert report.autograd_error > 0
    assert report.kept == pytest.approx(1)
    assert report.spectral_kept == pytest.approx({1: 1.0})


def test_weights_that_lie_on_disk_are_not_compared(config, capsys):
    """The modules of the layer that is in memory are; with none there is nothing to compare."""
    data = CheckedData(data=config.data.data)
    parts = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), "cpu")
    parts |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")

    def check_with(places):
        options = ModelOptions(device="cpu", device_map=json.dumps(places))
        return check(CheckConfig(config.model.model, "sst2", 2, data, options, sketch=config.sketch))

    assert 0 < check_with(parts).autograd_error < 1e-4
    assert "both without 7 modules whose weights lie" in capsys.readouterr().out
    with pytest.raises(UserError, match="Leave a layer where it runs"):
        check_with(parts | {"model.layers.0": "disk"})


@pytest.mark.parametrize("wrong", [{"examples": 0}, {"asked": -1}])
def test_nothing_to_check(wrong):
    with pytest.raises(UserError, match="should be at least 1"):
        CheckConfig("model", **wrong)
