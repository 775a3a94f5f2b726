"""Kits on the disk, refused where they were changed; answers as people and programs write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npeff.store.run import Run
from npeff.study.config import MakeConfig
from npeff.study.kit import Answer, Sheet, read_key, read_kit, read_sheet
from npeff.study.make import make
from npeff.utils.configs import replace, write_record
from npeff.utils.errors import UserError
from tests.study.conftest import drawn


def test_a_kit_that_was_changed_is_refused(run: Run, tmp_path: Path) -> None:
    made = make(MakeConfig(str(run.path), str(tmp_path / "kit"), ("npeff",), groups=4))
    content = (made / "groups.json").read_text()
    (made / "groups.json").write_text(content.replace("subject", "object", 1))
    with pytest.raises(UserError, match="was changed"):
        read_kit(made)
    (made / "groups.json").write_text("[]")
    with pytest.raises(UserError, match="JSON object"):
        read_kit(made)
    (made / "groups.json").write_text(content.replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="format 2; this npeff reads format 1"):
        read_kit(made)
    (made / "groups.json").write_text(content.replace('"samples"', '"examples"'))
    with pytest.raises(UserError, match="damaged, or was written by another version"):
        read_kit(made)
    (made / "groups.json").write_text(content)
    kit = read_kit(made)
    key = (made / "key" / "key.json").read_text()
    (made / "key" / "key.json").write_text(key.replace(kit.id, "0" * 12))
    with pytest.raises(UserError, match="another kit"):
        read_key(made, kit)
    (made / "key" / "key.json").unlink()
    with pytest.raises(UserError, match=r"no key/key\.json"):
        read_key(made, kit)
    with pytest.raises(UserError, match="not the kit of a study"):
        read_kit(tmp_path)


def test_a_kit_of_the_first_version_opens(tmp_path: Path) -> None:
    """As 0.1.0 wrote it: the id and the format came first, and an option of the config is called differently now."""
    groups = {
        "format": 1,
        "kit": "1d8c325b5ec6",
        "preamble": ["You will see texts."],
        "samples": [{"texts": ["a", "b"], "theme": "no", "words": ""}],
        "groups": [{"number": 1, "form": 1, "texts": ["c", "é"]}, {"number": 2, "form": 1, "texts": ["d", "e"]}],
    }
    key = {
        "format": 1,
        "kit": "1d8c325b5ec6",
        "npeff": "0.1.0",
        "config": {"run": "RUN", "decomposition": ["npeff"], "save_labels": None},
        "run": "0" * 64,
        "decompositions": {"npeff": "1" * 64},
        "groups": [
            {"number": 1, "decomposition": "npeff", "component": 3, "examples": [5, 6]},
            {"number": 2, "decomposition": None, "component": None, "examples": [7, 8]},
        ],
    }
    (tmp_path / "key").mkdir()
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    (tmp_path / "key" / "key.json").write_text(json.dumps(key))
    kit = read_kit(tmp_path)
    assert kit.groups[0].texts == ("c", "é")
    assert [entry.component for entry in read_key(tmp_path, kit).groups] == [3, None]


def content(kit_id: str, **changes: Any) -> str:
    values = {
        "format": 1,
        "kit": kit_id,
        "who": "Ada",
        "source": "person",
        "answers": {"1": {"theme": "yes", "words": "w"}},
    }
    return json.dumps({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kit": "0" * 12}, "not this one"),
        ({"format": 2}, r"format 2\), not this one"),
        ({"answers": []}, "damaged"),
        ({"answers": {}}, "has no answers"),
        ({"answers": {"1": "yes"}}, "damaged.*should be a mapping"),
        ({"answers": {"99": {"theme": "yes"}}}, "no group '99'"),
        ({"answers": {"1": {"theme": "perhaps"}}}, "damaged.*'perhaps'.*'yes', 'maybe', 'no'"),
        ({"answers": {"1": {"theme": True}}}, "damaged.*theme cannot be True"),
        ({"answers": {"1": {"theme": "yes", "words": 3}}}, "damaged.*words cannot be 3"),
        ({"answers": {"1": {"theme": "yes", "words": "w" * 5000}}}, "at most 2000"),
        ({"who": ["Ada"]}, "damaged.*who cannot be"),
        ({"who": "A" * 101}, "at most 100"),
        ({"colour": "red"}, "Unknown option colour"),
    ],
)
def test_damaged_answers_are_refused(made: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    kit = read_kit(made)
    (tmp_path / "a.json").write_text(content(kit.id, **changes))
    with pytest.raises(UserError, match=message):
        read_sheet(tmp_path / "a.json", kit)


def test_answers_survive_a_round_trip(made: Path, tmp_path: Path) -> None:
    kit = read_kit(made)
    sheet = drawn(5, read_key(made, kit), "Zoë", source="judge:x/y")
    write_record(tmp_path / "a.json", replace(sheet, kit=kit.id))
    words = {n: Answer(a.theme, "" if a.theme == "no" else a.words) for n, a in sheet.answers.items()}
    assert read_sheet(tmp_path / "a.json", kit) == Sheet("Zoë", words, "judge:x/y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,yes,a\n1,no,\n", "group 1 twice"),
        ("group,theme\n", "has no answers"),
        ("1\n", "a line needs"),
        ("group 50,yes,a\n", "no group '50'"),
        ("1,yep,a\n", "'yep'"),
    ],
)
def test_wrong_csv(made: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_sheet(tmp_path / "a.csv", read_kit(made))


def test_csv_as_people_write_it(made: Path, tmp_path: Path) -> None:
    (tmp_path / "eve.csv").write_bytes('\ufeffGroup 1, Yes ,"a, b"\r\n\r\n2,no\r\n3,,\r\n'.encode())
    sheet = read_sheet(tmp_path / "eve.csv", read_kit(made))
    assert sheet == Sheet("eve", {1: Answer("yes", "a, b"), 2: Answer("no")})
    (tmp_path / "bad.csv").write_bytes(b"1,yes,\xff\xfe\n")
    with pytest.raises(UserError, match="UTF-8"):
        read_sheet(tmp_path / "bad.csv", read_kit(made))
    (tmp_path / "a.txt").write_text("1,yes")
    with pytest.raises(UserError, match="not a filled form"):
        read_sheet(tmp_path / "a.txt", read_kit(made))
