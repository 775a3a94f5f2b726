from __future__ import annotations

import numpy as np
import pytest

from npeff.analyse.tunings import Classes, Examples
from npeff.explain.names import PRIOR, Lexicon, give_name


@pytest.fixture
def planted():
    """400 texts of random words; every fifth has "gem", and that is what the component goes by."""
    generator = np.random.default_rng(0)
    words = np.array([f"word{n}" for n in range(40)])
    texts = [" ".join(generator.choice(words, 6)) + (" a gem" if i % 5 == 0 else " .") for i in range(400)]
    scores = np.where(np.arange(400) % 5 == 0, generator.uniform(0.5, 1, 400), 0.0).astype(np.float32)
    codes = (np.arange(400) % 5 == 0).astype(np.int64)
    examples = Examples(
        Classes(codes, ["no", "yes"]), Classes(codes, ["no", "yes"]), np.arange(400), np.ones(400, bool)
    )
    return texts, scores, examples, np.arange(200, 400)


def test_a_planted_word_is_found_and_tells_held_out_examples(planted):
    texts, scores, examples, held_out = planted
    name = give_name(3, scores, Lexicon(texts, np.arange(200)), examples, held_out)
    assert set(name.words[:3]) == {"gem", "a", "a gem"}
    assert name.detection == 1.0
    assert name.component == 3
    label, _, length = name.skews
    assert (label.what, label.value, label.users) == ("label", "yes", 1.0)
    assert (length.value, length.users) == ("longer", 8.0)


def test_chance_gives_half(planted):
    texts, scores, examples, held_out = planted
    lexicon, generator = Lexicon(texts, np.arange(200)), np.random.default_rng(1)
    found = [give_name(0, generator.permutation(scores), lexicon, examples, held_out).detection for _ in range(40)]
    assert 0.45 < np.mean(found) < 0.55


def test_log_odds_are_those_of_the_formula():
    lexicon = Lexicon(["a b", "a c", "a", "c", "c b", "c c", "a c", "b"], np.arange(8))
    users, others = np.array([0, 1, 2]), np.array([3, 4, 5, 6, 7])
    odds, clarity = lexicon.log_odds(users, others)
    n = lexicon.words.index("a")
    prior = PRIOR * (4 + 0.5) / 9
    first, second = (3 + prior) / (3 + PRIOR - 3 - prior), (1 + prior) / (5 + PRIOR - 1 - prior)
    assert odds[n] == pytest.approx(np.log(first / second))
    assert clarity[n] == pytest.approx(np.log(first / second) / np.sqrt(1 / (3 + prior) + 1 / (1 + prior)))


def test_nothing_to_say(planted):
    texts, scores, examples, held_out = planted
    lexicon = Lexicon(texts, np.arange(200))
    assert give_name(0, np.zeros_like(scores), lexicon, examples, held_out).words == []
    assert give_name(0, scores, lexicon, examples, np.arange(0)).detection is None
