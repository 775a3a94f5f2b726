"""The code blocks of the Markdown files, as a reader sees them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("npeff", "torchrun", "make", "pip", "python", "git")
_FENCE = re.compile(r"^(`{3,})(.*)$")
_NAMED = re.compile(r"`([\w.-]+\.(?:yaml|jsonl|json|csv))`:$")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: Path
    line: int
    language: str
    """As the fence says; `indented` for a block without a fence."""
    text: str
    file: str | None
    """The file whose content it is, where the line before it ends with a file's name and a colon."""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Commands of programs that this project documents, split into arguments, comments left out."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        found = []
        for line in joined.splitlines():
            try:
                words = shlex.split(line.strip(), comments=True)
            except ValueError:  # not a command: a formula with a quote, for one
                continue
            while words and re.fullmatch(r"[A-Z_]+=\S*|srun", words[0]):  # environment, Slurm
                words = words[1:]
            if words and words[0] in PROGRAMS:
                found.append(words)
        return found


def read_blocks(page: Path) -> list[Block]:
    """All blocks of a page."""
    blocks: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, before = 0, ""
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        start = number
        if fence:
            while not lines[number := number + 1].startswith(fence[1]):
                pass
            text = "\n".join(lines[start + 1 : number])
            named = _NAMED.search(before)
            blocks.append(Block(page, start + 1, fence[2].strip(), text, named[1] if named else None))
            before = ""
        elif lines[number].startswith("    ") and not lines[number - 1].strip():
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
            text = "\n".join(line[4:] for line in lines[start : number + 1])
            blocks.append(Block(page, start + 1, "indented", text, None))
        elif lines[number].strip():
            before = lines[number].strip()
        number += 1
    return blocks


ALL = [block for page in PAGES for block in read_blocks(page)]
COMMAND_BLOCKS = [block for block in ALL if block.language in ("sh", "bash", "indented") and block.commands]
PYTHON_PAGES = [page for page in PAGES if any(block.language == "python" for block in read_blocks(page))]
