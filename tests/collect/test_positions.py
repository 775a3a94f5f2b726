"""Positions of running documents: which are chosen, and that sharing a forward pass changes nothing."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from npeff.analyse.config import AnalyseConfig
from npeff.analyse.run import analyse
from npeff.cli import main
from npeff.collect.batch import Collector
from npeff.collect.config import CollectConfig, DirectionsConfig, PositionsConfig, SketchConfig
from npeff.collect.positions import LEAST, SAME
from npeff.collect.run import collect
from npeff.collect.session import open_examples, prepare_with_prompts
from npeff.collect.sketch.make import make_sketch
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.explore.export import export_site
from npeff.models.answer_sets import resolve_answers
from npeff.models.answers import SEGMENT
from npeff.models.config import ModelConfig
from npeff.models.prompts import encode
from npeff.models.select import select_parameters
from npeff.store.examples import shown_texts
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.tasks.readers import BLOCK
from npeff.tasks.task import Task, load_task
from npeff.utils.errors import UserError
from tests import tiny
from tests.collect.test_capture import plain_rows
from tests.collect.test_refusals import refuse

CORPUS = Task("c", "{text}", "vocabulary", positions=True)
WORDS = " ".join(tiny.TEXTS).split()


def running_text(words: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(running_text(40, line) for line in range(30)))
    return path


@pytest.fixture
def config(tmp_path, model_directory, document):
    return CollectConfig(
        run=str(tmp_path / "run"),
        data=DataConfig(task="corpus", data=str(document), limit=40),
        model=ModelConfig(model=str(model_directory)),
        sketch=SketchConfig(dim=256),
        positions=PositionsConfig(chunk=300),
        shard_examples=16,
    )


def chosen(config, **changes):
    prepared, dataset, prompts = prepare_with_prompts(replace(config, **changes))
    return prepared, dataset.table.to_pylist(), prompts, dataset


# --- shared forward passes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3"])
def test_rows_of_positions_equal_those_of_each_prefix_alone_by_autograd(family):
    """Two documents of different length with positions in several segments, on their borders too."""
    model = tiny.loaded(family)
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=256), selection.modules)
    config = CollectConfig("", directions=DirectionsConfig("spectral:2"), activation=False, gradient=False)
    collector = Collector(config, model, resolve_answers(CORPUS, model.tokenizer), selection, sketch)
    long, short = (encode(model.tokenizer, running_text(60, seed))[:length] for seed, length in ((1, 71), (2, 40)))
    ends = ((long, 3), (short, 40), (long, SEGMENT), (long, SEGMENT + 1), (long, 71), (short, 5))
    prompts = [document[:end] for document, end in ends]
    batches = list(collector.batches(prompts, 150, shared=True))
    assert [len(batch) for batch in batches] == [4, 2]  # those of a document, and no pass through others for them
    batch = [i for own in batches for i in own]
    found = collector.collect([prompts[i] for i in batch], batch)
    assert sorted(batch) == list(range(len(prompts)))
    for row, i in enumerate(batch):
        with torch.no_grad():
            p = model.network(input_ids=torch.tensor([prompts[i]])).logits[0, -1].double().softmax(0)
        S = torch.diag(p) - p[:, None] * p
        values, vectors = torch.linalg.eigh(S)
        V = (vectors[:, -2:] * values[-2:].sqrt()).T.flip(0).float()
        if family in tiny.MIXTURES:  # experts have no plain weight gradients here; alone is tested in test_experts
            alone = collector.collect([prompts[i]], [i])["rows"][0]
            fisher, expected = (G.T @ G for G in (found["rows"][row], alone))
        else:
            _, G = plain_rows(model, selection, sketch, CORPUS, prompts[i], V)
            fisher, expected = found["rows"][row].T @ found["rows"][row], G.T @ G / (G @ G.T).norm()
        assert (fisher - expected).norm() < 1e-4 * expected.norm()


def test_activations_and_predictions_of_positions_are_those_of_each_alone():
    model = tiny.loaded("llama")
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=64), selection.modules)
    collector = Collector(CollectConfig(""), model, resolve_answers(CORPUS, model.tokenizer), selection, sketch)
    ids = encode(model.tokenizer, running_text(60))
    prompts = [ids[:end] for end in (50, 7, 33, 34)]
    together = collector.collect(prompts, [0, 1, 2, 3])
    for i, prompt in enumerate(prompts):
        alone = collector.collect([prompt], [i])
        for name in ("activation", "gradient", "probability", "prediction", "kept"):
            torch.testing.assert_close(together[name][i], alone[name][0], rtol=1e-3, atol=1e-5)


def test_a_model_whose_cache_does_not_work_is_asked_one_by_one(monkeypatch):
    model = tiny.loaded("llama")
    selection = select_parameters(model.network)
    sketch = make_sketch(SketchConfig(dim=64), selection.modules)
    ids = encode(model.tokenizer, running_text(60))
    prompts = [ids[:40], ids[:20]]
    collectors = [
        Collector(CollectConfig(""), model, resolve_answers(CORPUS, model.tokenizer), selection, sketch)
        for _ in range(2)
    ]
    wrong = collectors[1].answer_model.logits_along
    monkeypatch.setattr(collectors[1].answer_model, "logits_along", lambda *given: [z + 1 for z in wrong(*given)])
    assert [len(list(each.batches(prompts, 50, shared=True))) for each in collectors] == [1, 2]
    rows, others = (each.collect(prompts, [0, 1])["rows"] for each in collectors)
    torch.testing.assert_close(rows, others, rtol=1e-3, atol=1e-4)


# --- which positions ------------------------------------------------------------------------------------------------


def test_an_example_is_all_that_stands_before_a_token(config, document):
    prepared, rows, prompts, _ = chosen(config)
    tokenizer, text = prepared.model.tokenizer, document.read_text()
    assert len(rows) == 40
    for row, prompt in zip(rows, prompts, strict=True):
        chunk = encode(tokenizer, text[row["chunk"] : row["chunk"] + 300])
        assert prompt == chunk[: row["position"]] == encode(tokenizer, row["text"])
        assert row["position"] % 8 == 0
        with torch.no_grad():
            log_p = prepared.model.network(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(0)
        assert row["loss"] == pytest.approx(float(-log_p[chunk[row["position"]]]), rel=1e-3)
        assert row["entropy"] == pytest.approx(float(-(log_p.exp() @ log_p)), rel=1e-3)
        assert row["answer"] == tokenizer.decode([chunk[row["position"]]])
    assert len({(*prompt[-SAME:], row["answer"]) for row, prompt in zip(rows, prompts, strict=True)}) == 40


def test_random_positions_and_chunks_are_reproducible_and_differ_by_seed(config):
    drawn = PositionsConfig(chunk=300, per_chunk=2)
    places = []
    for seed in (0, 0, 1):
        _, rows, _, _ = chosen(config, positions=drawn, data=replace(config.data, shuffle_seed=seed, limit=12))
        places.append([(row["chunk"], row["position"]) for row in rows])
        assert all(row["position"] >= LEAST for row in rows)
        assert max(sum(place[0] == row["chunk"] for place in places[-1]) for row in rows) <= 2
    assert places[0] == places[1] != places[2]
    assert [place[0] for place in places[0]] != sorted(place[0] for place in places[0])


def test_rules_hold_at_the_chosen_positions(config):
    _, rows, _, _ = chosen(config)
    losses = sorted(row["loss"] for row in rows)
    rule = PositionsConfig(chunk=300, rule=f"loss > {losses[20]:.4f}, entropy < 9")
    _, surprising, _, _ = chosen(config, positions=rule)
    assert surprising
    assert min(row["loss"] for row in surprising) > losses[20] - 1e-3


def test_the_same_text_again_gives_no_further_examples(config, document):
    asked = {"positions": PositionsConfig(chunk=10_000, every=1), "data": replace(config.data, limit=400)}
    document.write_text((running_text(40) + "\n") * 2)
    _, twice, _, dataset = chosen(config, **asked)
    document.write_text(running_text(40) + "\n")
    _, once, _, _ = chosen(config, **asked)
    # at the beginning of the second time, contexts reach back into the first
    assert len(once) < len(twice) <= len(once) + SAME + 2
    assert any("context and target of an earlier one" in note for note in dataset.dropped)


def test_documents_may_be_records_or_compressed_text(config, document, tmp_path):
    _, rows, _, _ = chosen(config)
    records = tmp_path / "documents.jsonl"
    records.write_text(json.dumps({"content": document.read_text()}) + "\n")
    zipped = tmp_path / "book.txt.gz"
    zipped.write_bytes(gzip.compress(document.read_bytes()))
    for path in (records, zipped):
        _, same, _, _ = chosen(config, data=replace(config.data, data=str(path)))
        assert [row["text"] for row in same] == [row["text"] for row in rows]


def test_memory_does_not_grow_with_the_corpus(tmp_path, config):
    """Peak of Python's own memory while all chunks of a file are weighed, not only the first ones."""
    from npeff.collect.positions import chosen_chunks

    peaks = []
    for megabytes in (1, 8):
        path = tmp_path / f"{megabytes}.txt"
        line = running_text(2000) + "\n"
        path.write_text(line * (megabytes * 2**20 // len(line)))
        asked = replace(config, data=replace(config.data, data=str(path), shuffle_seed=0))
        documents = open_examples(load_task("corpus"), asked.data)
        tracemalloc.start()
        assert len(list(chosen_chunks(asked, documents, 100))) == 100
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 20 * BLOCK


# --- the rest of the pipeline ---------------------------------------------------------------------------------------


def test_a_run_of_positions_goes_through_the_pipeline(config, tmp_path, capsys):
    run = collect(config)
    again = Run.open(collect(config).path)
    assert "already complete" in capsys.readouterr().out
    assert again.fingerprint == run.fingerprint
    decompose(DecomposeConfig(run=config.run, decomposition="d", components=4))
    (analysis,) = analyse(AnalyseConfig(config.run, "d"))
    first = analysis.component[0].orderings[0]
    answers = run.table["answer"].to_pylist()
    assert sum(first.labels.values()) == len(first.top)
    assert set(first.labels) <= set(answers)
    shown = shown_texts(run.table).to_pylist()
    assert shown[3] == f"{run.table['text'][3].as_py()[-80:]}»{answers[3]}«"
    site = export_site(run, tmp_path / "site").parent
    script = (site / "data" / "examples" / "0.js").read_text()
    block = json.loads(script[script.index("{") : script.rindex("}") + 1])
    assert block["fields"]["loss"][3] == f"{run.table['loss'][3].as_py():.3g}"
    assert main(["probe", config.run, running_text(9)]) == 0
    assert "»" in capsys.readouterr().out


def test_check_takes_a_corpus(config, capsys, document):
    words = ["check", config.model.model, "corpus", "--data", str(document), "--examples", "2", "--asked", "8"]
    assert main([*words, "--dim", "256"]) == 0
    assert "rows against plain autograd" in capsys.readouterr().out


# --- bad input ------------------------------------------------------------------------------------------------------


def command(config, path, *more):
    return ["collect", config.run, "--task", "corpus", "--data", str(path), "--model", config.model.model, *more]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("there is no text",)),
        (b" \n\n \t\n", ("there is no text",)),
        (b"some text\nand \xff\xfe more", ("not UTF-8", "line 2")),
        (b"\x7fELF\x02\x01\x01\0\0\0\0", ("binary",)),
        (b"two words", ("longest of 1 chunks", "--chunk")),
    ],
)
def test_files_that_are_no_running_text(config, tmp_path, capsys, content, words):
    path = tmp_path / "corpus.txt"
    path.write_bytes(content)
    refuse(command(config, path), capsys, *words)
    assert not Path(config.run).exists()


def test_a_document_without_text(config, tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": running_text(90)}) + "\n" + json.dumps({"text": " "}) + "\n")
    refuse(command(config, path), capsys, "line 2", "empty", "--on-bad-example drop")
    assert main([*command(config, path, "--on-bad-example", "drop"), "--dim", "256", "--limit", "4"]) == 0


def test_positions_that_do_not_exist_and_rules_that_hold_nowhere(config, document, capsys):
    refuse(command(config, document, "--every", "5000"), capsys, "--every 5000", "larger --chunk")
    refuse(command(config, document, "--rule", "loss < 0.0001"), capsys, "holds at none of")
    refuse(command(config, document, "--rule", "loss is small"), capsys, "not understood", "loss < 0.1")
    refuse(command(config, document, "--every", "0"), capsys, "at least 1")
    refuse(command(config, document, "--few-shot", "2"), capsys, "neither few-shot")


def test_tasks_with_positions_are_plain_texts_and_the_vocabulary():
    for wrong in ({"prompt": "Text: {text}"}, {"answers": "tokens", "labels": ("a", "b")}, {"chat": True}):
        values = {"name": "t", "prompt": "{text}", "answers": "vocabulary", "positions": True}
        with pytest.raises(UserError, match="positions of documents need"):
            Task(**(values | wrong))
