"""Tasks: the paper's, a user's own, and what is said about a wrong one."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from npeff.tasks.config import BUILTIN, DataConfig
from npeff.tasks.data import Labels, answer_text
from npeff.tasks.task import Task, asked_task, load_task, task_from_yaml
from npeff.utils.errors import UserError

TOPICS = (
    "Society & Culture",
    "Science & Mathematics",
    "Health",
    "Education & Reference",
    "Computers & Internet",
    "Sports",
    "Business & Finance",
    "Entertainment & Music",
    "Family & Relationships",
    "Politics & Government",
)

STARS = Task("stars", "{text}\nStars:", "tokens", labels=("1", "2", "3"))
SENTIMENT = Task("s", "{text}\nSentiment:", "tokens", labels=("Negative", "Positive"))


def make(text: str) -> Task:
    return task_from_yaml(text, "mine", "mine.yaml")


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_tasks_load(name: str) -> None:
    task = load_task(name)
    assert task.name == name
    assert task.data
    assert not task.fields


def test_prompts_of_the_paper() -> None:
    """Appendix 'Task Formulations', character by character."""
    assert load_task("sst2").render("fine .") == "Review: fine .\nSentiment:"
    assert load_task("reviews").prompt == load_task("sst2").prompt
    assert load_task("clinc150").render("hi") == "Query: hi\nIntent:"
    assert load_task("triviaqa").render("Who?") == "Question: Who?\nAnswer:"
    assert load_task("yat").render("Why?") == (
        "Question: Why?\nWhat broad topic is this question about? Choose from:\n" + "\n".join(TOPICS) + ".\nTopic:"
    )


def test_a_task_for_chat_models_can_be_asked_without_a_chat() -> None:
    judge = asked_task(DataConfig("judge"))
    assert judge.chat is True
    assert judge.labels == load_task("reviews").labels
    plain = asked_task(DataConfig("judge", no_chat=True))
    assert plain == dataclasses.replace(judge, chat=False)
    assert plain.render("fine .").endswith("Review: fine .")
    assert asked_task(DataConfig("sst2", chat=True)).is_chat
    with pytest.raises(UserError, match="--chat and --no-chat"):
        DataConfig("judge", chat=True, no_chat=True)


def test_answers_of_the_paper() -> None:
    assert load_task("sst2").answers == "tokens"
    assert load_task("sst2").labels == load_task("reviews").labels == ("Negative", "Positive")
    assert load_task("yat").answers == "tokens"
    assert load_task("yat").labels == TOPICS
    assert load_task("triviaqa").answers == "vocabulary"
    assert load_task("triviaqa").labels == ()
    clinc = load_task("clinc150")
    assert clinc.answers == "suffixes"
    assert len(set(clinc.labels)) == len(clinc.labels) == 151
    assert clinc.labels[:4] == ("oos", "freeze account", "routing", "pin change")
    assert clinc.labels[-3:] == ("change ai name", "reset settings", "maybe")
    # the words that YAML would take for booleans
    assert clinc.labels.index("yes") == 139
    assert clinc.labels.index("no") == 141


def test_a_task_file(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("text,label\nhello,1\n")
    path = tmp_path / "polite.yaml"
    path.write_text('prompt: "{text}\\nPolite:"\nanswers: tokens\nlabels: ["no", "yes"]\ndata: data.csv\n')
    task = load_task(str(path))
    assert (task.name, task.labels) == ("polite", ("no", "yes"))
    assert task.data == str(tmp_path / "data.csv"), "data beside the task file are found from any directory"
    path.write_text(path.read_text().replace("data.csv", "some/hub-id"))
    assert load_task(str(path)).data == "some/hub-id"


def test_a_task_in_python_may_use_lists_and_is_checked_too() -> None:
    assert dataclasses.replace(SENTIMENT, labels=["a", "b"]).labels == ("a", "b")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no \\{text\\}"):
        dataclasses.replace(SENTIMENT, prompt="Sentiment:")


def test_fields_and_braces() -> None:
    task = Task("nli", "{{premise}} {text} / {hypothesis}\nEntails:", "tokens", labels=("No", "Yes"))
    assert task.fields == ("hypothesis",)
    assert task.render("{a}", {"hypothesis": "b"}) == "{premise} {a} / b\nEntails:"
    assert task.before([{"text": "a", "label": "Yes", "hypothesis": "b"}]) == ("{premise} a / b\nEntails: Yes\n\n", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("prompt: 'Sentiment:'", "no {text}"),
        ("prompt: '{text} '", "ends with white space"),
        ("prompt: |\n  {text}\n  Sentiment:\n", "starts with |-"),
        ("prompt: '{text} {}'", "not a valid template"),
        ("prompt: '{text'", "not a valid template"),
        ("prompt: '{text!r}'", "not a valid template"),
        ("prompt: '{text:>9}'", "not a valid template"),
        ("prompt: '{text.x} {text}'", "not a valid template"),
        ("prompt: 3", "prompt has 3, which is not text; put it in quotes"),
        ("answers: words", "one of tokens, suffixes, vocabulary"),
        ("answers: vocabulary", "leave out labels"),
        ("labels: [Good]", "only one label"),
        ("labels: []", "no labels"),
        ("labels: Good", "list of texts"),
        ("labels: [yes, no]", "labels has True, which is not text; put it in quotes"),
        ("labels: [Good, Good]", "'Good' is given twice"),
        ("labels: [' Good', Bad]", "the leading space is added for you"),
        ('labels: ["\\ud800", Bad]', "not text"),
        ("label_map: {x: Ugly}", "label_map gives 'Ugly' for 'x'"),
        ("label_map: {0: Bad}", "label_map has 0, which is not text; put it in quotes"),
        ("label_map: [Bad]", "should be a mapping"),
        ("label_numbers: 1", "true or false"),
        ("text_columns: []", "text_columns is empty"),
        ("few_shot: [{text: a}]", "example 1 should have label, text"),
        ("few_shot: [{text: a, label: Ugly}]", "not one of the labels"),
        ("few_shot: [3]", "list of mappings"),
        ("chat: yes please", "true, false, or a list of turns"),
        ("chat: [3]", "true, false, or a list of turns"),
        ("chat: [{critic: a}]", "turn 1 of chat should have one of system, user, assistant"),
        ("chat: [{system: a}, {user: b, assistant: c}]", "turn 2 of chat"),
        ("chat: [{system: 3}]", "chat has 3, which is not text; put it in quotes"),
        ("answer_start: 'Answer:'", "answer_start belongs to a chat"),
        ("answer_start: 'Answer: '", "answer_start ends with white space"),
        ("label: [a, b]", "unknown key 'label'; a task knows name, prompt"),
        ("answers: tokens\nanswers: tokens", "'answers' is given twice"),
    ],
)
def test_a_wrong_task_file_says_what_is_wrong(change: str, message: str) -> None:
    base = {"prompt": "prompt: '{text}'", "answers": "answers: tokens", "labels": "labels: [Good, Bad]"}
    base[change.split(":")[0]] = change
    with pytest.raises(UserError) as error:
        make("\n".join(base.values()))
    assert message in str(error.value)
    assert str(error.value).startswith("mine.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is a mapping"),
        ("- a", "is a mapping"),
        ("a: [", "not valid YAML"),
        ("prompt: '{text}'", "answers missing"),
    ],
)
def test_a_broken_task_file(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(text)


def test_unknown_tasks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown task 'sst3'.*Did you mean sst2"):
        load_task("sst3")
    with pytest.raises(UserError, match="nor a YAML file that exists"):
        load_task(str(tmp_path / "absent.yaml"))
    with pytest.raises(UserError, match="Unknown task"):
        load_task("\0")
    (tmp_path / "latin.yaml").write_bytes("prompt: é".encode("latin-1"))
    with pytest.raises(UserError, match="byte 8 is not UTF-8"):
        load_task(str(tmp_path / "latin.yaml"))


@settings(max_examples=150, deadline=None)
@given(st.text())
@example("a: 2001-99-99")
@example("a: !!int ''")
@example("? [a]\n: b")
@example("[" * 500)
def test_random_text_never_escapes_as_another_error(text: str) -> None:
    with pytest.raises(UserError):
        make(text)


KEYS = [field.name for field in dataclasses.fields(Task)]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["{text}", "tokens"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_random_values_make_a_task_or_a_user_error(values: dict[str, object]) -> None:
    try:
        task = make(yaml.safe_dump({"prompt": "{text}", "answers": "tokens", "labels": ["a", "b"], **values}))
    except UserError:
        return
    assert "x" in task.render("x", dict.fromkeys(task.fields, ""))


@pytest.mark.parametrize(
    ("value", "index"),
    [
        ("Positive", 1),
        ("positive", 1),
        (" NEGATIVE ", 0),
        (1, 1),
        ("1", 1),
        ("1.0", 1),
        (0.0, 0),
        (None, None),
        ("", None),
        (" ", None),
        (-1, None),
        ("-1", None),
        (float("nan"), None),
    ],
)
def test_labels(value: object, index: int | None) -> None:
    assert Labels(SENTIMENT).read(value) == index


@pytest.mark.parametrize("value", [2, -2, "good", True, 0.5, float("inf"), "9" * 5000, [1], {"a": 1}, "\u0661"])
def test_labels_that_mean_nothing(value: object) -> None:
    with pytest.raises(ValueError, match=r"unknown label|expected a text or a number") as error:
        Labels(SENTIMENT).read(value)
    assert len(str(error.value)) < 300


def test_a_label_that_python_refuses_to_print() -> None:
    with pytest.raises(ValueError, match=r"unknown label '0x"):
        Labels(SENTIMENT).read(10**5000)


def test_label_map_goes_first_and_numbers_do_not_count_where_they_mislead() -> None:
    mapped = dataclasses.replace(SENTIMENT, label_map={"1": "Negative", "pos": "Positive"})
    assert [Labels(mapped).read(value) for value in (1, "1", 0, "POS")] == [0, 0, 0, 1]
    assert Labels(STARS).read(1) == 0, "the answer 1, not the answer number 1"
    with pytest.raises(ValueError, match="not numbered"):
        Labels(STARS).read(0)
    clinc = Labels(load_task("clinc150"))
    assert clinc.read("freeze_account") == 1
    with pytest.raises(ValueError, match=r"not numbered.*151 in all"):
        clinc.read(42)


def test_an_ambiguous_label_is_refused() -> None:
    labels = Labels(Task("t", "{text}", "tokens", labels=("US", "us", "them")))
    assert [labels.read(value) for value in ("US", "us", "THEM")] == [0, 1, 2]
    with pytest.raises(ValueError, match="may mean 'US' and 'us'"):
        labels.read("Us")


def test_free_answers() -> None:
    values = ["Onion", {"value": "Onion", "aliases": ["x"]}, ["Onion", "x"], 3, None, "", [], {"value": None}]
    assert [answer_text(value) for value in values] == ["Onion", "Onion", "Onion", "3", None, None, None, None]
    with pytest.raises(ValueError, match="found dict"):
        answer_text({"aliases": []})


def test_the_examples_of_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)
    kinds = "yaml json sh python python yaml yaml yaml json"
    assert [language for language, _ in blocks] == kinds.split()
    (tmp_path / "polite.yaml").write_text(blocks[0][1], encoding="utf-8")
    (tmp_path / "requests.jsonl").write_text(blocks[1][1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for _, code in blocks[3:5]:
        exec(code, namespace)
    assert make(blocks[5][1]).before() == ("", ({"system": "You are a film critic."},))
    assert make(blocks[6][1]).is_open
    places = make(blocks[7][1]).places
    assert {"text", *(place["column"] for place in places)} == set(json.loads(blocks[8][1]))


def test_the_documentation_names_every_task_and_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    for name in (*BUILTIN, *KEYS, *(field.name for field in dataclasses.fields(DataConfig))):
        assert f"`{name}`" in page or name == "task"
