"""What says who we are agrees with itself."""

from __future__ import annotations

import re
import tomllib

import yaml

import npeff
from tests.docs.blocks import ROOT


def test_versions_and_licences_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == npeff.__version__
    assert citation["license"] == project["license"]
    assert re.search(rf"^## {re.escape(npeff.__version__)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_issue_templates_and_hooks_are_well_formed() -> None:
    for path in (*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"), ROOT / ".pre-commit-config.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path


def test_every_pinned_tool_of_the_dev_extra_is_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for requirement in wanted:
        name = re.split(r"[<>=;\[ ]", requirement)[0].lower().replace("_", "-")
        assert name in pinned, name
