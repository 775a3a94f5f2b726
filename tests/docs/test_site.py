"""The documentation site builds without a warning, links lead somewhere, and the table of costs is computed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from npeff.cli import COMMANDS
from tests.docs.blocks import PAGES, ROOT

LINKED = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / "trees")]
    subprocess.run([*command, str(ROOT / "docs"), str(tmp_path / "site")], check=True)
    commands = (tmp_path / "site" / "cli.html").read_text(encoding="utf-8")
    assert all(f'<section id="{name}' in commands for name in COMMANDS)
    assert "lift_component" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    foreign = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//')
    for page in (tmp_path / "site").rglob("*.html"):  # a site that works offline
        assert not foreign.search(page.read_text(encoding="utf-8")), page


def test_the_table_of_costs_is_what_its_script_prints() -> None:
    spec = importlib.util.spec_from_file_location("costs", ROOT / "docs" / "costs.py")
    assert spec is not None
    assert spec.loader is not None
    costs = importlib.util.module_from_spec(spec)
    sys.modules["costs"] = costs
    spec.loader.exec_module(costs)
    printed = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- costs -->")[1].split("<!-- /costs -->")[0]
    assert printed.strip() == costs.table()
    assert costs.MODELS[0].selected == 106_168_320  # what `npeff params smollm2-135m` says


def test_the_records_of_formats_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    printed = page.split("<!-- records -->\n")[1].split("<!-- /records -->")[0]
    assert printed == reference.records(), "run `python docs/reference.py`"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
