from __future__ import annotations

import shutil

import pytest
import torch
import yaml

from npeff.collect.config import CollectConfig, DirectionsConfig, SketchConfig
from npeff.collect.run import collect
from npeff.collect.session import prepare_run, read_prompts
from npeff.decompose.config import DecomposeConfig
from npeff.decompose.run import decompose
from npeff.models.config import ModelConfig
from npeff.perturb.config import PerturbConfig
from npeff.perturb.lift import Lifter
from npeff.store.run import Run
from npeff.tasks.config import DataConfig
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.files import read_object
from tests import tiny
from tests.conftest import write_reviews

METHODS = ("npeff", "gnpeff", "clusters", "svd-gradients")
WORDS = ("good", "bad", "fine", "dull", "great", "long", "old", "best", "half", "worth")


@pytest.fixture(autouse=True)
def one_thread():
    """The matrices are tiny: a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run(tmp_path_factory, model_directory, review_file):
    """40 reviews, a tiny Llama with biases, two answers, and a decomposition of every method; nothing held out."""
    return make_run(tmp_path_factory.mktemp("perturb") / "run", model_directory, review_file)


@pytest.fixture(scope="session")
def held_run(tmp_path_factory, model_directory):
    """120 reviews, of which 60 are held out."""
    folder = tmp_path_factory.mktemp("held")
    reviews = write_reviews(folder / "reviews.jsonl", 120)
    return make_run(folder / "run", model_directory, reviews, holdout=0.5)


def make_run(
    path,
    model_directory,
    review_file,
    task="sst2",
    directions="auto",
    dim=2048,
    holdout=0.0,
    methods=METHODS,
    **options,
):
    torch.set_num_threads(1)
    made = collect(
        CollectConfig(
            run=str(path),
            data=DataConfig(task=task, data=str(review_file)),
            model=ModelConfig(model=str(model_directory)),
            sketch=SketchConfig(dim=dim, copies=2),
            directions=DirectionsConfig(directions),
            storage="float32",
            shard_examples=16,
            batch_tokens=200,
            **options,
        )
    )
    for method in methods:
        decompose(
            DecomposeConfig(
                run=str(path),
                decomposition=method,
                method=method,
                components=6,
                tolerance=1e-9,
                max_passes=2000,
                holdout=holdout,
                device="cpu",
            )
        )
    return made


@pytest.fixture(scope="session")
def prepared(run):
    return prepare_run(run, "cpu")


@pytest.fixture(scope="session")
def prompts(run, prepared):
    return read_prompts(run, prepared)


@pytest.fixture(scope="session")
def lifter(run, prepared, prompts):
    return Lifter(run, prepared, prompts)


@pytest.fixture(scope="session")
def many_answers(tmp_path_factory, review_file):
    """A tiny GPT-2 (Conv1D with biases) and ten answers."""
    folder = tmp_path_factory.mktemp("many")
    tiny.save(folder / "model", "gpt2")
    task = {"name": "ten", "prompt": "Review: {text}\nSentiment:", "labels": list(WORDS), "answers": "tokens"}
    (folder / "ten.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    lines = review_file.read_text(encoding="utf-8").replace('"negative"', '"bad"').replace('"positive"', '"good"')
    (folder / "ten.jsonl").write_text(lines, encoding="utf-8")
    return make_run(folder / "run", folder / "model", folder / "ten.jsonl", task=str(folder / "ten.yaml"))


@pytest.fixture
def config(held_run, tmp_path):
    """A config for a copy of the run, so that tests do not see each other's results."""
    shutil.copytree(held_run.path, tmp_path / "run")
    return PerturbConfig(
        run=str(tmp_path / "run"),
        decomposition="npeff",
        component=(1, 4),
        direction="reject",
        top=4,
        random=16,
        target_kl=1e-3,
        nulls=3,
        device="cpu",
    )


def change(config, **changes):
    return from_dict(PerturbConfig, to_dict(config) | changes)


def results(config, label):
    folder = Run.open(config.run).path / "perturbations" / label
    return folder, read_object(folder / "results.json")
