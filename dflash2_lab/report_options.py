"""The options of the report and compare commands.

What the commands do with them stands in `report_commands`.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def add_report_options(command: argparse.ArgumentParser) -> None:
    """Of `report`."""
    command.add_argument(
        "folder",
        type=Path,
        metavar="RUN",
        help="any run folder: trace, record, decode, train, bench, verify, reproduce",
    )
    command.add_argument(
        "--out", type=Path, default=None, metavar="FILE", help="default: report.html in RUN"
    )


def add_compare_options(command: argparse.ArgumentParser) -> None:
    """Of `compare`."""
    command.add_argument(
        "a",
        type=Path,
        metavar="RUN_A",
        help="a record run, or stored values with intervals: a file of `replay --json` or of "
        "`compare --json` (its RUN_B), or an evaluation.json of the zoo",
    )
    command.add_argument("b", type=Path, metavar="RUN_B", help="a record run")
    command.add_argument(
        "--policy",
        action="append",
        default=[],
        help="of both, or X:Y for X of RUN_A and Y of RUN_B; repeatable (default: each drafter's "
        "own, those that both recorded, oracle@16)",
    )
    command.add_argument(
        "--out", type=Path, default=None, metavar="FILE", help="also write an HTML page"
    )


OPTIONS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "report": add_report_options,
    "compare": add_compare_options,
}
