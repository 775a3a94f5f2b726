"""Kits on the disk: refused where they were changed, and those of 0.1.0 still open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npeff.store.run import Run
from npeff.study.config import MakeConfig
from npeff.study.kit import read_key, read_kit
from npeff.study.make import make
from npeff.utils.errors import UserError


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
