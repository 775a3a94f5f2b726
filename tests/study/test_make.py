"""What a kit shows, what it keeps apart, and that it comes out the same again."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from npeff import cli
from npeff.decompose.run import open_decomposition
from npeff.store.layout import choose_decomposition
from npeff.store.run import Run
from npeff.store.schema import AskedTask
from npeff.study.config import MakeConfig, ScoreConfig
from npeff.study.kit import Answer, KeyEntry, Sheet, read_key, read_kit
from npeff.study.make import CUT, LONGEST, about_task, deal, make
from npeff.study.score import score
from npeff.tasks.config import BUILTIN
from npeff.tasks.task import load_task
from npeff.utils.configs import write_record
from npeff.utils.errors import UserError
from tests.synthetic import add_decomposition, make_run


def test_groups_are_tops_of_components_or_random_texts(run: Run, made: Path) -> None:
    kit, texts = read_kit(made), run.table["text"].to_pylist()
    key = read_key(made, kit)
    assert [group.number for group in kit.groups] == list(range(1, 21))
    assert Counter(group.form for group in kit.groups) == {1: 10, 2: 10}
    for form in (1, 2):
        kinds = [key.groups[group.number - 1].decomposition for group in kit.of_form(form)]
        assert kinds.count(None) == 5
    counts = Counter(entry.decomposition for entry in key.groups)
    assert counts == {None: 10, "npeff": 5, "clusters": 5}
    components = [(entry.decomposition, entry.component) for entry in key.groups if entry.decomposition]
    assert len(set(components)) == len(components)
    tops: set[str] = set()
    for entry, group in zip(key.groups, kit.groups, strict=True):
        assert group.texts == tuple(texts[i] for i in entry.examples)
        assert len(set(group.texts)) == 5
        assert not {7, 70} & set(entry.examples)  # set aside
        if entry.decomposition is not None:
            tops |= set(group.texts)
            scores = open_decomposition(run, entry.decomposition).scores().numpy()[:, entry.component]
            # brute force: walk down the ranking, take a text the first time it comes
            best: list[str] = []
            for i in sorted(range(300), key=lambda i: (-scores[i], i)):
                if scores[i] > 0 and texts[i] not in best:
                    best.append(texts[i])
            assert set(group.texts) == set(best[:5])
    random = [
        text
        for entry, group in zip(key.groups, kit.groups, strict=True)
        if entry.component is None
        for text in group.texts
    ]
    assert len(set(random)) == len(random) == 50
    assert not set(random) & tops


def test_nothing_that_is_handed_out_tells_the_key(run: Run, made: Path) -> None:
    handed = [path for path in made.iterdir() if path.is_file()]
    names = {path.name for path in handed}
    assert names == {"form-1.html", "form-2.html", "groups.json"}
    assert {path.name for path in (made / "key").iterdir()} == {"key.json", "README.txt"}
    for path in handed:
        content = path.read_text(errors="replace")
        content = content.replace("npeff-study:", "")
        for hint in ("npeff-", "cluster", "component", "random", "seed", "fingerprint", str(run.path)):
            assert hint not in content.lower(), (path, hint)
    # programs see of a group its number, its form and its texts
    values = json.loads((made / "groups.json").read_text())
    assert set(values) == {"format", "kit", "preamble", "samples", "groups"}
    assert all(set(group) == {"number", "form", "texts"} for group in values["groups"])


def test_the_order_says_nothing() -> None:
    """Over many seeds a component group comes first as often as last, and its best example at every place."""
    tops = [KeyEntry(0, "npeff", component, (0, 1, 2, 3, 4)) for component in range(2)]
    controls = [KeyEntry(0, None, None, (5, 6, 7, 8, 9)), KeyEntry(0, None, None, (10, 11, 12, 13, 14))]
    firsts, places = [], Counter[int]()
    for seed in range(400):
        dealt = deal(np.random.default_rng(seed), tops, controls, forms=1)
        firsts.append(dealt[0][1].component is not None)
        places.update(group.examples.index(0) for _, group in dealt if group.component is not None)
    assert 160 < sum(firsts) < 240  # four standard deviations around one half
    assert all(115 < places[place] < 205 for place in range(5))


def test_the_same_command_gives_the_same_files(run: Run, made: Path, tmp_path: Path) -> None:
    config = MakeConfig(str(run.path), str(tmp_path / "again"), ("npeff", "clusters"), groups=10, forms=2, seed=3)
    again = make(config)
    for path in (p for p in made.rglob("*") if p.is_file()):
        assert (again / path.relative_to(made)).read_bytes() == path.read_bytes()
    make(config)  # into the same place: completes it, changes nothing
    other = MakeConfig(str(run.path), str(again), ("npeff",), seed=4)
    with pytest.raises(UserError, match="something else"):
        make(other)


def test_without_a_name_the_default_is_studied(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(MakeConfig(str(run.path), str(tmp_path / "kit"), groups=4))
    name = choose_decomposition(run.path)
    assert set(read_key(made, read_kit(made)).decompositions) == {name}
    assert f"about {name}, in" in capsys.readouterr().out


def test_long_and_further_texts(tmp_path: Path) -> None:
    texts = [f"{i} {'word ' * 400}" for i in range(80)]
    run = make_run(tmp_path / "run", texts)
    add_decomposition(run, components=4)
    kit = read_kit(make(MakeConfig(str(run.path), str(tmp_path / "kit"), groups=4)))
    for group in kit.groups:
        for text in group.texts:
            assert text.endswith(CUT)
            assert len(text) <= LONGEST


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decomposition": ("nmf",)}, "no finished decomposition 'nmf'"),
        ({"groups": 40}, "has 12 components with 5 distinct.*20 are needed"),
        ({"size": 25, "groups": 12, "random_share": 0.9}, "11 control groups need 275 distinct texts"),
    ],
)
def test_what_cannot_be_made_is_said(run: Run, tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(MakeConfig(str(run.path), str(tmp_path / "kit"), **{"decomposition": ("npeff",), **options}))  # type: ignore[arg-type]
    assert not (tmp_path / "kit").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"size": 1},
        {"forms": 0},
        {"random_share": 0.0},
        {"random_share": 1.0},
        {"decomposition": ("a", "a")},
        {"about": " "},
        {"seed": -1},
    ],
)
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        MakeConfig("run", "out", **options)  # type: ignore[arg-type]


def test_the_command_line(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kit"
    make_it = ["study", "make", str(run.path), str(out), "--decomposition", "npeff", "--groups", "6"]
    assert cli.main(make_it) == 0
    kit = read_kit(out)
    write_record(tmp_path / "ada.json", Sheet("Ada", {1: Answer("yes", "numbers")}, kit=kit.id))
    assert cli.main(["study", "score", str(out), str(tmp_path / "ada.json")]) == 0
    assert re.search(r"Ada \| npeff", capsys.readouterr().out)
    assert cli.main(["study", "score", str(out), str(tmp_path / "absent.json")]) == 2
    assert "There is no file" in capsys.readouterr().err
    assert cli.main(["study", "judge", str(out), "--endpoint", "localhost", "--model", "m"]) == 2
    assert "not an address" in capsys.readouterr().err
    assert cli.main(["study", "score", str(out), "a.json", "--save-labels", "RUN"]) == 2
    assert "--save-labels is now --save-themes" in capsys.readouterr().err
    assert cli.main(["study", "judge", str(out), "--endpoint", "http://h", "--model", "m", "--wait", "1"]) == 2
    assert "--wait is gone" in capsys.readouterr().err
    with pytest.raises(UserError):
        ScoreConfig(str(out), ())
    assert score(ScoreConfig(str(out), (str(tmp_path / "ada.json"),))) == out / "results"


def test_every_built_in_task_is_described() -> None:
    for name in BUILTIN:
        task = load_task(name)
        said = about_task(AskedTask(name, task.prompt, labels=list(task.labels)))
        assert said.startswith("The texts are ")
        assert "{" not in said
        assert ("Politics & Government" in said) == (name == "yat")
    own = about_task(AskedTask("tickets", "Ticket: {text}\nUrgent:", labels=["Yes", "No"]))
    assert "Ticket: [text] Urgent:" in own
    assert "Yes, No" in own
    assert "3 answers" not in about_task(AskedTask("q", "{text}"))


def test_rows_from_elsewhere_need_a_description() -> None:
    with pytest.raises(UserError, match="--about"):
        about_task(AskedTask())
