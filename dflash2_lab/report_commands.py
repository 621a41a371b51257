"""Reports and comparisons: the two commands, and the page of any run as a function."""

import argparse
from pathlib import Path
from typing import Any

from dflash2_lab.comparison import compare as compare_runs
from dflash2_lab.comparison import read_reference
from dflash2_lab.errors import LabError
from dflash2_lab.html_comparison import comparison_page
from dflash2_lab.html_page import write_page
from dflash2_lab.html_report import record_page
from dflash2_lab.html_results import KINDS, decode_page, results_page
from dflash2_lab.tables import Run

Result = dict[str, object]
PAGE = "report.html"


def report(arguments: argparse.Namespace) -> Result:
    """Write the page of a run."""
    path = arguments.out or arguments.folder / PAGE
    write_report(arguments.folder, path)
    return {"text": str(path), "json": {"file": str(path), "bytes": path.stat().st_size}}


def compare(arguments: argparse.Namespace) -> Result:
    """Compare two record runs, or a record run with reference values."""
    b = Run.open(arguments.b, "record")
    if arguments.a.is_file():
        runs = None
        found = compare_runs(read_reference(arguments.a), b, arguments.policy)
    else:
        a = Run.open(arguments.a, "record")
        runs = (a, b)
        found = compare_runs(a, b, arguments.policy)
    result: dict[str, Any] = found.to_dict()
    text = found.text()
    if arguments.out is not None:
        write_page(arguments.out, comparison_page(found, runs))
        result["file"] = str(arguments.out)
        text += f"\n{arguments.out}"
    return {"text": text, "json": result}


def write_report(run: Run | Path | str, path: Path | str) -> Path:
    """Write one self-contained HTML page on a run: numbers with intervals, figures, provenance.

    Args:
        run: a record or decode run, or the folder of any run that `report_page` knows.
        path: of the page.

    Raises:
        LabError: a kind of run that has no page, or tables that are missing or cannot be read.
    """
    path = Path(path)
    write_page(path, report_page(run))
    return path


def report_page(run: Run | Path | str) -> str:
    """The page as HTML text; arguments and errors as `write_report`."""
    opened = run if isinstance(run, Run) else Run.open(run)
    kind = opened.info.get("kind")
    if kind == "record":
        return record_page(opened)
    if kind == "decode":
        return decode_page(opened)
    if kind in KINDS and opened.folder is not None:
        return results_page(opened.folder)
    where = opened.folder or "run in memory"
    known = ", ".join(("record", *KINDS))
    raise LabError(f"{where}: a run of kind {kind!r} has no report, expected one of {known}")
