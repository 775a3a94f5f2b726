"""Contexts: how they are drawn, and that reading one once changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npeff.collect.config import CollectConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run
from npeff.models.config import ModelConfig
from npeff.paper.config import IclConfig
from npeff.paper.icl_context import Predictor, draw, render
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.errors import UserError
from tests import tiny
from tests.synthetic import make_run


def test_sets_do_not_meet_the_scored_examples(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [f"text {i}" for i in range(160)])
    labels = np.where(np.arange(160) < 100, -1, 0)
    config = IclConfig("run", shots=6, sets=20, scored=40, seed=3)
    drawn = draw(run, labels, config)
    assert len(drawn.sets) == 20
    assert all(len(set(chosen)) == 6 for chosen in drawn.sets)
    assert len(set(drawn.scored)) == 40
    assert min(drawn.scored) >= 100, "others have no label"
    assert not set(drawn.scored) & {example for chosen in drawn.sets for example in chosen}
    assert draw(run, labels, config) == drawn
    with pytest.raises(UserError, match="Only 60 usable examples have a label"):
        draw(run, labels, IclConfig("run", shots=6, scored=55))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "opt", "llama as a chat"])
def test_reading_the_context_once_changes_nothing(family: str, tmp_path: Path, review_file: Path) -> None:
    family, chat = family.split(" ")[0], "chat" in family
    tiny.save(tmp_path / "model", family)
    tiny.tokenizer_with(tiny.CHATML if chat else None).save_pretrained(tmp_path / "model")
    config = CollectConfig(
        str(tmp_path / "run"),
        data=DataConfig(data=str(review_file), chat=chat),
        model=ModelConfig(str(tmp_path / "model")),
        sketch=SketchConfig(dim=64),
        fisher=False,
        gradient=False,
    )
    other = collect(config)
    prepared = prepare_run(other)
    context = render(prepared.task, other.table, [0] if chat else [0, 1])  # longer would not fit
    if chat:
        assert context[0] == ""
        assert [list(turn) for turn in context[1]] == [["user"], ["assistant"]]
        assert context[1][1] == {"assistant": "Negative"}
    else:
        assert context[0].count("Review: ") == 2
        assert "Sentiment: Negative\n\n" in context[0]
    shared, plain = Predictor(prepared), Predictor(prepared)
    plain.shares = False
    examples = other.table.slice(2)
    assert shared.predict(context, examples).tolist() == plain.predict(context, examples).tolist()
    assert shared.shares, "the first batch agreed with whole prompts"
    # without a context the run's own predictions come back
    assert shared.predict(("", ()), other.table).tolist() == other.table["prediction"].to_pylist()


def test_a_cache_that_disagrees_is_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(prepare_run(run))
    plain = predictor._behind

    def behind(past: object, prompts: list[list[int]]) -> torch.Tensor:
        return plain(None, prompts) if past is None else torch.randn(len(prompts), 2) * 9

    monkeypatch.setattr(predictor, "_behind", behind)
    assert predictor.predict(("", ()), run.table).tolist() == run.table["prediction"].to_pylist()
    assert not predictor.shares
