"""The options of the figures command.

What the command does with them stands in `figure_commands`.
"""

import argparse
from pathlib import Path


def add_figures_options(command: argparse.ArgumentParser) -> None:
    """Runs to draw, or, without one, the figures of record to redraw or verify."""
    command.add_argument(
        "runs",
        nargs="*",
        metavar="[NAME=]RUN",
        help="record runs, shown in this order; without one, the figures of record are drawn again",
    )
    command.add_argument("--out", type=Path, default=None, help="folder for the figures of RUN")
    command.add_argument(
        "--format", action="append", default=[], help="json, html, png, svg; repeatable (all four)"
    )
    command.add_argument("--dark", action="store_true", help="draw RUN in the dark look")
    command.add_argument(
        "--verify", action="store_true", help="check the figures of record byte by byte instead"
    )
    command.add_argument(
        "--folder", type=Path, default=None, help="figures of record (default: figures/ of a clone)"
    )
