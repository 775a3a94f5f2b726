"""Who takes part in what."""

from __future__ import annotations

import shutil

import numpy as np
import pyarrow as pa
import pytest

from npeff.decompose.run import open_decomposition
from npeff.perturb.config import PerturbConfig
from npeff.perturb.protocol import make_plan
from npeff.perturb.whitening import DirectionMaker
from npeff.store.run import Run
from npeff.utils.errors import UserError
from tests.conftest import write_reviews
from tests.perturb.conftest import make_run


def options(component=(), count=1, top=4, random=16, **others):
    return PerturbConfig("", component=component, count=count, top=top, random=random, **others)


def plan_of(run, method="npeff", components=(1, 4), count=3, evaluate_on=None, **others):
    return make_plan(run, open_decomposition(run, method), options(components, count, **others), evaluate_on)


def test_parts_have_no_example_in_common(held_run):
    plan = plan_of(held_run)
    held_out = open_decomposition(held_run, "npeff").notes.held_out
    assert len(held_out) == 60
    parts = [plan.fit, plan.tune.examples, plan.test.examples]
    assert sorted(np.concatenate(parts).tolist()) == list(range(120))
    assert sorted(np.concatenate(parts[1:]).tolist()) == held_out
    assert [len(part) for part in parts] == [60, 20, 40]
    for part in (plan.tune, plan.test):
        assert np.isin(part.random, part.examples).all()
        assert len(part.random) == 16
    subject = plan.component(1)
    for part, ranked in ((plan.tune, subject.tune), (plan.test, subject.test)):
        assert np.isin(np.concatenate([ranked[0].top, ranked[0].related]), part.examples).all()


@pytest.mark.parametrize("direction", ["whiten", "reject", "plain"])
@pytest.mark.parametrize("method", ["npeff", "clusters", "svd-gradients"])
def test_directions_are_made_of_the_fit_alone(held_run, method, direction):
    """No held-out example carries a direction."""
    plan = plan_of(held_run, method, components=(), count=2)
    decomposition = open_decomposition(held_run, method)
    config = options(direction=direction, ridge=0.01, carriers=0.5)
    maker = DirectionMaker(held_run, decomposition, plan, config)
    subjects = [plan.null(0, 0), *map(plan.component, plan.components)]
    sums = maker.make(subjects).sums
    for kind, weights in sums.weights.items():
        assert len(held_run.source(kind).ranks) == weights.shape[1]  # one row an example
        assert not weights[:, decomposition.notes.held_out].any()
        assert weights[:, plan.fit].any(1).all()


def test_random_examples_do_not_depend_on_the_components(held_run):
    plans = [plan_of(held_run, components=chosen) for chosen in ((4,), (1, 4), ())]
    for plan in plans:
        np.testing.assert_array_equal(plan.test.random, plans[0].test.random)
        np.testing.assert_array_equal(plan.tune.examples, plans[0].tune.examples)
    np.testing.assert_array_equal(plans[0].component(4).test[0].top, plans[1].component(4).test[0].top)
    assert set(plans[2].components) <= set(plan_of(held_run, components=(), count=5).components)


def test_held_out_top_examples_have_the_largest_coefficients_of_their_part(held_run):
    decomposition = open_decomposition(held_run, "svd-gradients")
    plan = plan_of(held_run, "svd-gradients", components=(2,))
    coefficients = decomposition.coefficients[:, 2].numpy()
    signed = {"positive": coefficients, "negative": -coefficients, "absolute": abs(coefficients)}
    for part, every in ((plan.tune, plan.component(2).tune), (plan.test, plan.component(2).test)):
        assert [ranked.order for ranked in every] == ["positive", "negative", "absolute"]
        for ranked in every:
            scores = signed[ranked.order]
            expected = sorted((i for i in part.examples if scores[i] > 0), key=lambda i: -scores[i])
            assert [*ranked.top.tolist(), *ranked.related.tolist()] == expected[:8]


def test_nulls_are_groups_of_the_same_size(held_run):
    plan = plan_of(held_run)
    nulls = [plan.null(number, 0) for number in range(4)]
    for null in nulls:
        assert np.isin(null.group, plan.fit).all()
        assert [len(each) for each in (null.group, null.tune[0].top, null.test[0].top)] == [4, 4, 4]
        assert np.isin(null.tune[0].top, plan.tune.examples).all()
        assert np.isin(null.test[0].top, plan.test.examples).all()
    assert len({tuple(null.group) for null in nulls}) == 4
    np.testing.assert_array_equal(nulls[2].group, plan.null(2, 0).group)
    assert (plan.null(2, 1).group != nulls[2].group).any()


def test_another_run_can_serve(held_run, tmp_path, model_directory):
    reviews = write_reviews(tmp_path / "other.jsonl", 150)
    other = make_run(tmp_path / "other", model_directory, reviews, methods=())
    plan = plan_of(held_run, evaluate_on=other)
    # the first 120 reviews have the same texts: those that were fitted are left out
    fitted = np.setdiff1d(np.arange(120), open_decomposition(held_run, "npeff").notes.held_out)
    measured = np.concatenate([plan.tune.examples, plan.test.examples])
    assert sorted(measured.tolist()) == sorted(set(range(150)) - set(fitted.tolist()))
    assert plan.run is other
    # coefficients are those that the same texts have in the decomposed run
    mine = open_decomposition(held_run, "npeff").coefficients.numpy()
    np.testing.assert_allclose(plan.scores["positive"][:120][:, 4], mine[:, 4], atol=2e-2)


def test_the_papers_protocol_measures_what_was_fitted(run):
    plan = plan_of(run, components=(2,), protocol="paper")
    assert plan.tune is plan.test
    np.testing.assert_array_equal(plan.test.examples, np.arange(40))
    np.testing.assert_array_equal(np.union1d(plan.fit, plan.test.random), np.arange(40))
    with pytest.raises(UserError, match="40 usable examples: too few"):
        plan_of(run, components=(1,), random=37, protocol="paper")


def test_without_held_out_examples_nothing_is_measured_silently(run, held_run, tmp_path, capsys):
    with pytest.raises(UserError, match=r"took part in the fit .* --holdout 0\.3.*--evaluate-on.*--protocol paper"):
        plan_of(run)
    shutil.copytree(held_run.path, tmp_path / "few")
    few = Run.open(tmp_path / "few")
    decomposition = open_decomposition(few, "npeff")
    decomposition.notes.held_out = decomposition.notes.held_out[:20]
    with pytest.raises(UserError, match="20 held-out examples are too few"):
        make_plan(few, decomposition, options((1,)))
    texts = few.table["text"].to_pylist()
    fitted = np.setdiff1d(np.arange(120), open_decomposition(few, "npeff").notes.held_out)
    texts[open_decomposition(few, "npeff").notes.held_out[0]] = texts[fitted[0]]
    place = few.table.column_names.index("text")
    few.table = few.table.set_column(place, "text", pa.array(texts))
    plan = make_plan(few, open_decomposition(few, "npeff"), options((1,)))
    assert len(plan.tune.examples) + len(plan.test.examples) == 59
    assert "1 held-out examples have a text that was fitted" in capsys.readouterr().out


def test_a_component_that_is_hardly_used_is_refused(held_run):
    decomposition = open_decomposition(held_run, "npeff")
    plan = plan_of(held_run)
    decomposition.coefficients[plan.test.examples[3:], 1] = 0
    with pytest.raises(
        UserError, match="Component 1 is used by fewer than 4 of the 20 examples to choose on or of the 40"
    ):
        make_plan(held_run, decomposition, options((1,)))
    drawn = make_plan(held_run, decomposition, options(count=6))
    assert 1 not in drawn.components
