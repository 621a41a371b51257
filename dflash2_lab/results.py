"""Results that are no recordings: benchmarks, checks, the battery's score, the monitor's paths.

Such a run is a folder with run.json and one file; its kind says which file and how to read it.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pandas as pd

from dflash2_lab.errors import LabError
from dflash2_lab.tables import read_run_info

FAILED = ("bug", "differ", "faulty")  # verdicts of a check that failed
MONITOR_KIND, MONITOR_TABLE = "monitor-paths", "monitor_paths.parquet"


@dataclass(frozen=True, eq=False)
class Results:
    """`info` is run.json, `values` the JSON object or the table of the run."""

    info: Mapping[str, Any]
    values: Any


def read_results(folder: Path | str, kind: str | None = None) -> Results:
    """Read the run in `folder`; `kind` is the kind that is expected.

    Raises:
        LabError: run.json is missing or of another kind, or its file is missing or malformed.
    """
    info = read_run_info(Path(folder))
    found = info.get("kind")
    if found not in _READERS or kind not in (None, found):
        expected = repr(kind) if kind else "one of " + ", ".join(map(repr, _READERS))
        raise LabError(f"{folder}: found a run of kind {found!r}, expected {expected}")
    name, read = _READERS[found]
    path = Path(folder) / name
    if not path.is_file():
        raise LabError(f"{path}: not found, expected beside its run.json")
    try:
        return Results(info, read(path))
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: malformed ({error})") from error


def command_line(info: Mapping[str, Any]) -> str:
    """The command that made a run, from its run.json, and in brackets its device, torch and commit.

    Paths of the machine that ran it are cut to their last part. Raises LabError without a command.
    """
    made = info.get("environment", {})
    if not made.get("command"):
        raise LabError("run.json: found no environment.command, expected the command of the run")
    name, *words = made["command"]
    script = PurePath(name).stem
    is_module = script != "__main__" and (Path(__file__).parent / f"{script}.py").is_file()
    told = f"python -m dflash2_lab.{script}" if is_module else "dflash2-lab"
    words = [PurePath(word).name if re.match("/|[A-Z]:", word) else word for word in words]
    where = f"{made['device']}, torch {made['packages']['torch']}, {str(made['git'])[:7]}"
    return f"{shlex.join([*told.split(), *words])}   [{where}]"


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


_READERS: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "bench": ("bench.json", _json),
    "verify-decode": ("certificate.json", _json),
    **{
        f"verify-{what}": ("verify.json", _json)
        for what in ("samples", "against", "enumeration", "mutants", "replay")
    },
    MONITOR_KIND: (MONITOR_TABLE, pd.read_parquet),
}
