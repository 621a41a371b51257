"""What the project prints for people to type: commands, Python and make targets, by where."""

import json
import re
import shlex
import textwrap
from pathlib import Path

from dflash2_lab import cli
from dflash2_lab.losslessness import options

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "figures/README.md", "docs/*.md", "dflash2_lab/zoo/**/README.md")
FILES = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def notebook_text(path: Path) -> str:
    """The text cells of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


TEXTS = {
    **{str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES},
    **{path.name: notebook_text(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
    "--help": cli.EPILOG,
    "verify --help": options.EPILOG,
}


def commands(text: str) -> list[str]:
    """What follows `dflash2-lab` in every indented line, and in quotes in a sentence."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = re.findall(r"^ {2,}(?:\.venv/bin/)?dflash2-lab (.*)$", joined, flags=re.MULTILINE)
    found += re.findall(r"`dflash2-lab ([^`]+)`", text)
    return [shlex.join(shlex.split(line, comments=True)) for line in found]


def python_blocks(text: str) -> list[str]:
    """Fenced and indented blocks that import from this package."""
    fenced = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^    .*\n|^\n)+", text, flags=re.MULTILINE)
    imports = re.compile(r"^(?:import|from) dflash2_lab", flags=re.MULTILINE)
    blocks = [*fenced, *map(textwrap.dedent, indented)]
    return [block for block in blocks if imports.search(block)]


def make_targets(text: str) -> list[str]:
    """Targets in a code line or quoted in a sentence."""
    return re.findall(r"(?:^    |`|\(|: )make ([a-z][a-z-]*)", text, flags=re.MULTILINE)
