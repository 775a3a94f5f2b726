"""What a run holds, against plain autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml

from npeff.collect.config import CollectConfig, DirectionsConfig
from npeff.collect.run import collect
from npeff.collect.session import collect_texts
from npeff.models.config import ModelConfig
from npeff.models.load import load_model
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError
from tests import tiny
from tests.collect.runs import with_run


def test_a_run_holds_what_plain_autograd_finds(config, model_directory):
    run = collect(with_run(config, config.run, storage="float32"))
    assert run.table.num_rows == 40
    model = load_model(ModelConfig(model=str(model_directory)))
    rows, gradients, activations = run.source("fisher"), run.source("gradient"), run.source("activation")
    ids = [model.tokenizer(f" {label}").input_ids[0] for label in ("Negative", "Positive")]
    from npeff.collect.sketch.make import make_sketch
    from npeff.models.select import select_parameters

    selection = select_parameters(model.network)
    sketch = make_sketch(config.sketch, selection.modules)
    weights = {n: p for m in selection.modules for n, p in m.module.named_parameters(prefix=m.name, recurse=False)}
    for parameter in weights.values():
        parameter.requires_grad_(True)
    for i in (0, 7, 8, 39):
        text = run.table["text"][i].as_py()
        prompt = model.tokenizer(f"Review: {text}\nSentiment:", return_tensors="pt").input_ids
        output = model.network(prompt, output_hidden_states=True)
        log_p = output.logits[0, -1, ids].log_softmax(0)
        best = float(log_p.detach().max().exp())
        scores = []
        for y in range(2):
            found = dict(
                zip(weights, torch.autograd.grad(log_p[y], list(weights.values()), retain_graph=True), strict=True)
            )
            scores.append(
                sketch.matvec(
                    {
                        m.name: m.matrix(found[m.name + ".weight"], found.get(m.name + ".bias"))
                        for m in selection.modules
                    }
                )
            )
        fisher = sum(log_p[y].exp().detach() * torch.outer(s, s) for y, s in enumerate(scores))
        row = rows.read(i, i + 1)
        assert float(run.table["pef_norm"][i].as_py()) == pytest.approx(float(fisher.norm()), rel=1e-3)
        torch.testing.assert_close(row.T @ row, fisher / fisher.norm(), rtol=1e-3, atol=1e-5)
        prediction = int(log_p.argmax())
        assert run.table["prediction"][i].as_py() == prediction
        assert run.table["prediction_text"][i].as_py() == ("Negative", "Positive")[prediction]
        assert run.table["probability"][i].as_py() == pytest.approx(best, rel=1e-4)
        expected = scores[prediction] / scores[prediction].norm()
        torch.testing.assert_close(gradients.read(i, i + 1)[0], expected, rtol=1e-3, atol=1e-4)
        # the residual stream before the final norm
        normed = model.network.model.norm(activations.read(i, i + 1))
        torch.testing.assert_close(normed[0], output.hidden_states[-1][0, -1], rtol=1e-3, atol=1e-4)
        assert float(run.tensor("probabilities")[i, prediction]) == pytest.approx(best, rel=1e-4)


def test_half_precision_storage_and_reading_across_shards(config, tmp_path):
    half = collect(config)
    full = collect(with_run(config, tmp_path / "full", storage="float32"))
    a, b = half.source("fisher").read(5, 30), full.source("fisher").read(5, 30)
    assert a.dtype == torch.float32
    assert a.shape == (25, 256)
    assert (a - b).norm() < 1e-3 * b.norm()
    assert torch.equal(full.source("fisher").read(0, 40)[5:30], b)
    assert len(full.source("fisher").read(3, 3)) == 0


def test_ragged_ranks(config, tmp_path):
    task = tmp_path / "intents.yaml"
    task.write_text(
        yaml.safe_dump({"prompt": "Q: {text}\nIntent:", "answers": "suffixes", "labels": list(tiny.INTENTS)})
    )
    directions = DirectionsConfig("spectral:0.7")
    values = to_dict(config)
    values["data"]["task"] = str(task)
    values["directions"] = to_dict(directions)
    data = tmp_path / "unlabelled.tsv"
    data.write_text("text\n" + "\n".join(tiny.TEXTS))
    values["data"]["data"] = str(data)
    run = collect(from_dict(CollectConfig, values))
    source = run.source("fisher")
    assert len(set(source.ranks.tolist())) > 1
    assert run.table["label"].null_count == len(tiny.TEXTS)
    for i in range(len(tiny.TEXTS)):
        rows = source.read(i, i + 1)
        assert len(rows) == source.ranks[i]
        assert float((rows @ rows.T).norm()) == pytest.approx(1, abs=1e-3)
    assert len(source.read(0, 6)) == source.ranks.sum()
    assert np.all(run.table["kept"].to_numpy() >= 0.7)


@pytest.mark.parametrize("only", ["fisher", "gradient", "activation"])
def test_each_kind_can_be_collected_alone(config, only):
    kinds = {name: name == only for name in ("fisher", "gradient", "activation")}
    run = collect(with_run(config, config.run, **kinds))
    assert len(run.source(only).read(0, 40)) == 40
    for other in kinds:
        if other != only:
            with pytest.raises(UserError, match=f"--{other}"):
                run.source(other)


def test_vocabulary_answers(config, tmp_path):
    values = to_dict(config)
    values["data"] |= {"task": "triviaqa", "text_column": "text", "limit": 5}
    values["directions"] |= {"directions": "spectral:4", "rank": 2}
    run = collect(from_dict(CollectConfig, values))
    assert run.source("fisher").ranks.tolist() == [2] * 5
    assert run.tensor("top_tokens").shape == (5, 8)
    token = run.table["prediction"][0].as_py()
    assert int(run.tensor("top_tokens")[0, 0]) == token
    assert run.table["prediction_text"][0].as_py() == tiny.tokenizer().decode([token])


def test_many_directions_of_many_answers_make_smaller_batches(config, monkeypatch):
    from npeff.collect import batch as collector
    from npeff.collect.session import load_prompts, prepare

    values = to_dict(config)
    values["data"] |= {"task": "triviaqa", "text_column": "text"}
    values["directions"] |= {"directions": "projection:16"}
    prepared = prepare(from_dict(CollectConfig, values))
    _, prompts = load_prompts(prepared)
    vocabulary = prepared.collector.answer_model.count
    assert max(map(len, prepared.collector.batches(prompts, 1000))) > 3
    monkeypatch.setattr(collector, "DIRECTION_ENTRIES", 3 * 16 * vocabulary)
    batches = list(prepared.collector.batches(prompts, 1000))
    assert max(map(len, batches)) == 3
    assert sorted(i for batch in batches for i in batch) == list(range(40))


def test_texts_given_on_the_spot_equal_the_run(config):
    run = collect(with_run(config, config.run, storage="float32"))
    texts = run.table["text"].to_pylist()[:3]
    rows, found = collect_texts(run, texts)
    torch.testing.assert_close(rows.read(0, 3), run.source("fisher").read(0, 3), rtol=1e-3, atol=1e-4)
    assert found["prediction"].tolist() == run.table["prediction"].to_pylist()[:3]


def test_values_that_are_not_finite_are_set_aside(config, tmp_path, capsys):
    network = tiny.network("llama")
    tokenizer = tiny.tokenizer()
    bad = tokenizer(" mess").input_ids[0]
    network.model.embed_tokens.weight.data[bad] = float("nan")
    network.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "data.csv"
    data.write_text("text,label\na fine film,positive\nit is a mess,negative\none of the best,positive\n")
    values = to_dict(config)
    values["model"]["model"] = str(tmp_path / "model")
    values["data"]["data"] = str(data)
    # a tied head would spread the NaN to every example
    assert not network.config.tie_word_embeddings
    run = collect(from_dict(CollectConfig, values))
    assert run.table["set_aside"].to_pylist() == [None, "a value was not finite", None]
    assert run.source("fisher").ranks.tolist() == [1, 0, 1]
    assert bool(run.source("fisher").read(0, 3).isfinite().all())
    for kind in ("gradient", "activation"):
        rows = run.source(kind).read(0, 3)
        assert rows.shape[0] == 2
        assert bool((rows.norm(dim=1) > 0).all())
        assert torch.equal(run.source(kind).read(2, 3), rows[1:])
    assert "example 1" in capsys.readouterr().out
