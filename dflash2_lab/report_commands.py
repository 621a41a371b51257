"""Reports and comparisons: the two commands, and the page of any run as a function."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash2_lab.comparison import compare as compare_runs
from dflash2_lab.comparison import read_reference
from dflash2_lab.errors import LabError
from dflash2_lab.html_certificate import certificate_page
from dflash2_lab.html_comparison import comparison_page
from dflash2_lab.html_page import write_page
from dflash2_lab.html_report import main_job_page, record_page
from dflash2_lab.html_results import bench_page, decode_page, monitor_page, train_page
from dflash2_lab.html_trace import trace_page
from dflash2_lab.html_verify import PRINTED, printed_page, samples_page
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
        run: a recording, traces or a decode, or the folder of any run.
        path: of the page.

    Returns:
        `path`.

    Raises:
        LabError: a kind of run that has no page, or tables that are missing or cannot be read.
    """
    path = Path(path)
    write_page(path, report_page(run))
    return path


def report_page(run: Run | Path | str) -> str:
    """The page as HTML text; arguments and errors as `write_report`."""
    opened = run if isinstance(run, Run) else Run.open(run)
    kind, where = opened.info.get("kind"), opened.folder or "run in memory"
    if kind not in PAGES:
        known = ", ".join(PAGES)
        raise LabError(f"{where}: a run of kind {kind!r} has no report, expected one of {known}")
    if opened.folder is None and kind not in IN_MEMORY:
        raise LabError(f"run in memory: of kind {kind!r}, expected one of {', '.join(IN_MEMORY)}")
    try:
        return PAGES[kind](opened)
    except (LookupError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise LabError(
            f"{where}: this run of kind {kind!r} is incomplete or malformed ({said}), expected "
            "what this version of dflash2-lab writes"
        ) from error


PAGES: Mapping[str, Callable[[Run], str]] = {
    "record": record_page,
    "trace": trace_page,
    "decode": decode_page,
    "train": train_page,
    "reproduce": main_job_page,
    "bench": bench_page,
    "verify-decode": certificate_page,
    "verify-samples": samples_page,
    **dict.fromkeys(PRINTED, printed_page),
    "monitor-paths": monitor_page,
}
IN_MEMORY = ("record", "trace", "decode")
