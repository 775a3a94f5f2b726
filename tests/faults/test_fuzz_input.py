"""Malformed tasks, data and configs: refused in words, never with another exception, never with a hang."""

from __future__ import annotations

import dataclasses
import gzip
import json
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from npeff.cli import COMMANDS
from npeff.tasks.config import BUILTIN, DataConfig
from npeff.tasks.data import load_dataset
from npeff.tasks.readers import LONGEST_LINE
from npeff.tasks.task import LARGEST, Task, load_task, task_from_yaml
from npeff.utils.configs import from_dict, from_options, to_dict
from npeff.utils.errors import UserError
from tests.faults import cases
from tests.faults.fuzzing import (
    NUMBERS,
    ODD_VALUES,
    TEXTS,
    many,
    mutated,
    no_hang,
    odd_value,
    only_user_errors,
    seeded,
)

TASK = Task("t", "{title}: {text} It is", "tokens", labels=("bad", "good"), label_map={"0": "bad"})
RECORDS: list[dict[str, Any]] = [
    {"text": "a fine film", "label": "good", "title": "One"},
    {"text": 'said "no", then\nleft', "label": "bad", "title": "Twø"},
    {"text": "naïve 😀", "label": 0, "title": "3"},
]


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_mutated_task_files(tmp_path: Path) -> None:
    random = seeded()
    folder = resources.files("npeff") / "tasks" / "builtin"
    originals = [(folder / f"{name}.yaml").read_bytes()[:600] for name in BUILTIN]
    path = tmp_path / "task.yaml"
    for _ in range(cases(2500, 8000)):
        path.write_bytes(mutated(random.choice(originals), random))
        with only_user_errors():
            load_task(str(path))


def test_odd_values_in_tasks() -> None:
    random = seeded()
    names = [field.name for field in dataclasses.fields(Task)]
    whole = {"prompt": "{text} It is", "answers": "tokens", "labels": ["bad", "good"]}
    for _ in range(cases(1500, 6000)):
        values = {name: odd_value(random) for name in random.choices(names, k=random.choice((1, 1, 2, 3)))}
        with only_user_errors():
            task_from_yaml(json.dumps(whole | values), "t", "t.yaml")  # JSON is YAML, and quicker to write
        with only_user_errors():
            Task(**({"name": "t"} | whole | values))


@many(cases(100, 1000))
@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(Task)]), ODD_VALUES))
def test_any_values_in_tasks(values: dict[str, Any]) -> None:
    whole = {"prompt": "{text} It is", "answers": "tokens", "labels": ["bad", "good"]}
    with only_user_errors():
        task_from_yaml(yaml.safe_dump(whole | values), "t", "t.yaml")


BOMBS = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "prompt: *i\nanswers: tokens\n",
    "merges": "x0: &x0 {k: v}\n"
    + "".join(f"x{n + 1}: &x{n + 1} {{<<: [{','.join([f'*x{n}'] * 9)}]}}\n" for n in range(9)),
    "a list in itself": "prompt: &a [*a]\nanswers: tokens\n",
    "depth": "prompt: " + "[" * 100_000,
    "tags": "prompt: !!python/object/apply:os.system [exit 1]\nanswers: tokens\n",
    "a large file": "prompt: '{text}'\n" + "# nothing\n" * (LARGEST // 8),
}


@pytest.mark.parametrize("name", BOMBS)
def test_task_files_that_would_take_all_memory_or_run_code(name: str, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(BOMBS[name])
    with no_hang(), pytest.raises(UserError) as refused:
        load_task(str(tmp_path / "task.yaml"))
    assert len(str(refused.value)) < 1000


# --- data -------------------------------------------------------------------------------------------------------------


def originals(folder: Path) -> list[tuple[str, bytes]]:
    """The same examples in every format, by name of the file."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
    table = pa.Table.from_pylist([{key: str(value) for key, value in record.items()} for record in RECORDS])
    pq.write_table(table, folder / "original.parquet")
    pa.csv.write_csv(table, folder / "original.csv")
    csv = (folder / "original.csv").read_bytes()
    return [
        ("x.jsonl", lines),
        ("x.json", json.dumps(RECORDS).encode()),
        ("x.csv", csv),
        ("x.tsv", b"text\tlabel\ttitle\nfine\tgood\tOne\nnot\tbad\tTwo\n"),
        ("x.csv.gz", gzip.compress(csv)),
        ("x.jsonl.gz", gzip.compress(lines)),
        ("x.parquet", (folder / "original.parquet").read_bytes()),
    ]


def test_mutated_data_files(tmp_path: Path) -> None:
    random = seeded()
    files = originals(tmp_path)
    for number in range(cases(3500, 10000)):
        name, content = files[number % len(files)]
        path = tmp_path / name
        path.write_bytes(mutated(content, random))
        config = DataConfig(
            data=str(path),
            on_bad_example=random.choice(("error", "drop")),
            unique=random.random() < 0.5,
            few_shot=random.choice((0, 0, 1, 3)),
            limit=random.choice((None, 1, 10**6)),
        )
        with only_user_errors():
            load_dataset(TASK, config)


def test_odd_records(tmp_path: Path) -> None:
    random = seeded()
    path = tmp_path / "odd.jsonl"
    for _ in range(cases(2000, 6000)):
        records = [
            {name: odd_value(random) for name in ("text", "label", "title", "x") if random.random() < 0.8}
            for _ in range(random.randrange(4))
        ]
        if random.random() < 0.5:
            records = [*RECORDS, *records]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        with only_user_errors():
            load_dataset(TASK, DataConfig(data=str(path), on_bad_example="drop"))


COLUMNS = {
    "numbers": pa.array([1, 2, 3]),
    "nothing": pa.nulls(3),
    "lists": pa.array([["a"], [], None]),
    "structures": pa.array([{"a": 1}] * 3),
    "bytes": pa.array([b"\xff", b"a", None]),
    "times": pa.array([0, 1, None], pa.timestamp("ns")),
    "words of a dictionary": pa.array(["a", "b", "a"]).dictionary_encode(),
    "decimals": pa.array([None, None, None], pa.decimal128(5, 2)),
    "long texts": pa.array(["a", "b", "c"], pa.large_string()),
}


@pytest.mark.parametrize("text", COLUMNS)
@pytest.mark.parametrize("label", COLUMNS)
def test_parquet_columns_of_any_type(text: str, label: str, tmp_path: Path) -> None:
    table = pa.table({"text": COLUMNS[text], "label": COLUMNS[label], "title": pa.array(["x", "y", "z"])})
    pq.write_table(table, tmp_path / "x.parquet")
    for what in ("error", "drop"):
        with only_user_errors():
            load_dataset(TASK, DataConfig(data=str(tmp_path / "x.parquet"), on_bad_example=what))  # type: ignore[arg-type]


def test_odd_encodings_are_named(tmp_path: Path) -> None:
    text = "text,label,title\nnaïve,good,x\n"
    path = tmp_path / "x.csv"
    for encoding in ("utf-16", "utf-16-le", "utf-32", "latin-1", "cp037"):
        path.write_bytes(text.encode(encoding))
        with pytest.raises(UserError, match=r"x\.csv"):
            load_dataset(TASK, DataConfig(data=str(path)))
    path.write_bytes(text.encode("utf-8-sig"))
    assert load_dataset(TASK, DataConfig(data=str(path))).table["text"].to_pylist() == ["naïve"]


def test_a_line_of_20_megabytes_is_an_example_like_others(tmp_path: Path) -> None:
    long = "x" * 20_000_000
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": long, "title": "t"}) + '\n{"text": "short", "title": "t"}\n')
    table = load_dataset(TASK, DataConfig(data=str(tmp_path / "x.jsonl"))).table
    assert [len(text) for text in table["text"].to_pylist()] == [len(long), 5]
    (tmp_path / "x.csv").write_text(f'text,title\n"{long}",t\nshort,t\n')
    assert len(load_dataset(TASK, DataConfig(data=str(tmp_path / "x.csv"))).table) == 2


def test_a_line_that_would_take_all_memory_is_refused(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.jsonl.gz", "wb", compresslevel=1) as handle:
        for _ in range(LONGEST_LINE // 2**24 + 1):
            handle.write(bytes(2**24))
    with pytest.raises(UserError, match="line 1 has more than"):
        load_dataset(TASK, DataConfig(data=str(tmp_path / "x.jsonl.gz")))


# --- configs ----------------------------------------------------------------------------------------------------------


def config_classes() -> list[type[Any]]:
    """Classes of all commands that are one dataclass."""
    kinds = [command.load_config() for command in COMMANDS.values()]
    return [kind for kind in kinds if dataclasses.is_dataclass(kind)]


def test_odd_configs() -> None:
    random = seeded()
    kinds = config_classes()
    names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in kinds}
    for _ in range(cases(600, 3000)):
        kind = random.choice(kinds)
        values = {
            random.choice((*names[kind], "x")): random.choice((odd_value(random), {"seed": odd_value(random)}))
            for _ in range(random.randrange(4))
        }
        with only_user_errors():
            random.choice((from_dict, from_options))(kind, values)


def test_one_odd_value_in_a_whole_config() -> None:
    """Every field of every config with every odd number and text: accepted as it is, or refused."""
    for kind in config_classes():
        required = {
            field.name: "x"
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            for value in (*NUMBERS, *TEXTS):
                with only_user_errors():
                    config = from_dict(kind, required | {field.name: value})
                    assert to_dict(from_dict(kind, to_dict(config))) == to_dict(config), (kind, field.name, value)
                    if hints[field.name] in (int, int | None):
                        assert -(2**53) < value < 2**53
