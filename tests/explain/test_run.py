from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch

import npeff
from npeff.cli import main
from npeff.explain.casestudy import casestudy
from npeff.explain.config import CaseStudyConfig, ExplainConfig
from npeff.explain.records import read_explanations
from npeff.explain.run import explain
from npeff.explore.inside import is_found
from npeff.explore.themes import Themes
from npeff.store.run import Run


@pytest.fixture(scope="module")
def copy(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("copy") / "run"
    shutil.copytree(run.path, path)
    return Run.open(path)


@pytest.fixture(scope="module")
def explained(copy):
    return explain(ExplainConfig(str(copy.path), "npeff", (2, 0), examples=3, device="cpu"))


def test_everything_about_a_component(copy, explained):
    assert [each.component for each in explained] == [0, 2]
    for each in explained:
        assert [words.held_out for words in each.words] == [False] * 3 + [True] * 3
        texts = copy.table["text"].to_pylist()
        for words in each.words:
            text = texts[words.example]
            assert "".join(text[a:b] for a, b in words.places) == text.replace(" ", "")
            assert len(words.effects) == len(words.places)
            assert max(words.effects) <= 1.0001
        assert each.answers.argues_for in ("Negative", "Positive")
        assert each.fidelity >= 0.9
        assert sum(each.parts.layers) == pytest.approx(1, abs=1e-3)
        assert [point.parts for point in each.parts.curve] == [0.01, 0.03, 0.1, 0.3]
        assert len(each.trace.sizes[0]) == len(each.trace.tokens)
        assert len(each.trace.attention) == 3
        assert each.trace.examples == [words.example for words in each.words if words.held_out]
        assert [len(row) for row in each.trace.mean] == [len(each.trace.places)] * len(each.trace.sizes)
        assert [place for place in each.trace.places if place.startswith("text")] == [
            f"text {n}/8" for n in range(1, 9)
        ]


def test_what_is_done_is_not_done_again(copy, explained, monkeypatch, capsys):
    monkeypatch.setattr("npeff.explain.run.prepare_run", None)
    again = explain(ExplainConfig(str(copy.path), "npeff", (2, 0), examples=3, device="cpu"))
    assert again == explained
    assert read_explanations(copy, "npeff") == {each.component: each for each in explained}


def test_it_continues_with_what_is_missing(copy, explained):
    more = explain(ExplainConfig(str(copy.path), "npeff", (0, 1), examples=3, parts=False, device="cpu"))
    assert more[0] == explained[0]
    assert more[1].parts is None
    assert more[1].words


def test_methods_without_shares(copy):
    (found,) = explain(ExplainConfig(str(copy.path), "clusters", (1,), examples=2, device="cpu"))
    assert found.words is not None
    assert found.parts is not None


def test_a_component_that_is_not_there(copy, capsys):
    assert main(["explain", str(copy.path), "--decomposition", "npeff", "--component", "4"]) == 2
    assert "components 0 to 3, not 4" in capsys.readouterr().err


def test_case_study(copy, capsys):
    study = casestudy(CaseStudyConfig(str(copy.path), 0, "npeff", examples=2, device="cpu"))
    assert [case.variant for case in study.cases].count("as it is") == 4
    assert {case.held_out for case in study.cases} == {False, True}
    first = study.cases[0]
    stored = npeff.open_decomposition(copy, "npeff").coefficients[first.example, 0]
    assert first.coefficient == pytest.approx(float(stored), rel=0.02, abs=1e-3)
    folder = copy.path / "explanations" / "npeff" / "casestudies"
    with (folder / "00000.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [case.text for case in study.cases]
    assert "begin{tabular}" in (folder / "00000.tex").read_text(encoding="utf-8")
    assert len(json.loads((folder / "00000.json").read_text(encoding="utf-8"))["cases"]) == len(rows)
    without = next(case for case in study.cases if case.variant.startswith("without"))
    assert len(without.text.split()) == len(first.text.split()) - 1


def test_words_of_any_text(copy):
    (found,) = npeff.weigh_words(copy, ["a film of great charm"], decomposition="npeff")
    assert len(found.places) == 5
    assert [len(row) for row in found.effects] == [5] * len(found.components)
    (empty,) = npeff.weigh_words(copy, [" "], component=[1], decomposition="npeff")
    assert empty.effects == [[]]
    assert [name.component for name in npeff.name_components(copy, "npeff")] == [0, 1, 2, 3]


def led_by(explanation):
    return [(head.layer, head.number) for head in explanation.parts.leading_heads[:4]]


def test_components_are_found_by_what_is_known_of_them(copy):
    npeff.analyse_run(copy, "npeff", refits=0)
    names = npeff.name_components(copy, "npeff")
    (one,) = explain(ExplainConfig(str(copy.path), "npeff", (1,), examples=1, device="cpu"))
    Themes(copy, "npeff").add(3, "Films with Charm", "a note")

    def found(query):
        return [each.number for each in npeff.find_components(copy, query, "npeff")]

    assert found("") == [0, 1, 2, 3]
    assert found("charm FILMS note") == [3]
    argues = {answer: found(f"argues:{answer}") for answer in ("Negative", "Positive")}
    assert sorted(argues["Negative"] + argues["Positive"]) == [0, 1, 2, 3]
    assert (1 in argues["Positive"]) == (one.answers.argues_for == "Positive")
    known = read_explanations(copy, "npeff")
    assert found("head:") == sorted(known)
    for head in one.parts.leading_heads[:4]:
        own = [j for j in known if (head.layer, head.number) in led_by(known[j])]
        assert 1 in found(f"head:{head.layer}.{head.number}") == sorted(own)
    assert all(name.component in found(word) for name in names for word in name.words)
    assert 2 in found(npeff.list_components(copy, "npeff")[2].top[0])
    components = npeff.open_decomposition(copy, "npeff").components
    cosines = (
        torch.nn.functional.cosine_similarity(components[:, None], components[None], dim=2).abs().fill_diagonal_(0)
    )
    assert found("like:2") == sorted(cosines[2].topk(3).indices.tolist())
    assert found("like:2 argues:Positive") == [j for j in argues["Positive"] if j != 2]
    assert is_found("like:1", "x like:1 like:17")
    assert not is_found("like:1", "x like:17 like:21")
    assert found("no such thing") == []


@pytest.mark.parametrize("answers", ["vocabulary", "suffixes"])
def test_other_answers(tmp_path, model_directory, review_file, answers):
    labels = (
        'labels: ["weather", "what song", "what"]\nlabel_map: {negative: weather, positive: what}\n'
        if answers == "suffixes"
        else ""
    )
    (tmp_path / "task.yaml").write_text(f'prompt: "Q: {{text}}\\nA:"\nanswers: {answers}\n{labels}', encoding="utf-8")
    run = npeff.collect_run(
        tmp_path / "run",
        task=tmp_path / "task.yaml",
        data=review_file,
        model=model_directory,
        dim=256,
        limit=24,
        storage="float32",
    )
    npeff.decompose_run(run, components=3, device="cpu")
    (found,) = npeff.explain_components(run, [0], examples=2, device="cpu")
    assert [words.held_out for words in found.words] == [False, False]
    assert found.parts.curve == []  # nothing was held out, so no effect is measured
    assert len(found.answers.names) == (3 if answers == "suffixes" else 8)


def test_damage_is_found(copy, explained, capsys):
    file = copy.path / "explanations" / "npeff" / "components" / "00002.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"component": 2', '"component": 3'), encoding="utf-8")
    try:
        assert main(["verify", str(copy.path), "--no-repair"]) == 2
        assert "00002.json" in capsys.readouterr().out
    finally:
        file.write_text(text, encoding="utf-8")
