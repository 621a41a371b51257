"""What the figures command does: draws runs, or redraws and verifies the figures of record."""

import argparse

from dflash2_lab.errors import LabError
from dflash2_lab.figure_manifest import find_folder, redraw, verify
from dflash2_lab.figures import FORMATS, save_figures, themed
from dflash2_lab.recording_figures import record_figures
from dflash2_lab.tables import Run, assert_comparable

Result = dict[str, object]


def figures(arguments: argparse.Namespace) -> Result:
    """Draw the figures of runs; without a run, redraw or verify the figures of record."""
    if arguments.runs:
        return _of_runs(arguments)
    if arguments.out is not None or arguments.format or arguments.dark:
        raise LabError("--out, --format and --dark: expected a RUN to draw beside them")
    return _verify(arguments) if arguments.verify else _redraw(arguments)


def _of_runs(arguments: argparse.Namespace) -> Result:
    if arguments.verify or arguments.folder is not None:
        raise LabError("--verify and --folder are about the figures of record: expected no RUN")
    if arguments.out is None:
        raise LabError("--out DIR: expected beside a RUN to draw")
    runs: dict[str, Run] = {}
    for word in arguments.runs:
        name, equals, folder = word.rpartition("=")
        run = Run.open(folder, "record")
        name = name if equals else run.info["drafter"]["name"]
        if name in runs:
            raise LabError(f"two runs are called {name!r}; name them, as in NAME=RUN")
        runs[name] = run
    assert_comparable(runs)
    drawn = record_figures(runs)
    if arguments.dark:
        drawn = {name: themed(figure) for name, figure in drawn.items()}
    saved = save_figures(drawn, arguments.out, tuple(arguments.format) or FORMATS)
    lines = [*map(str, saved.paths), *([saved.skipped] if saved.skipped else [])]
    written = {"files": [str(path) for path in saved.paths], "skipped": saved.skipped}
    return {"text": "\n".join(lines), "json": written}


def _redraw(arguments: argparse.Namespace) -> Result:
    redrawn = redraw(arguments.folder or find_folder())
    lines = [f"changed  {path}" for path in redrawn.paths] or ["nothing changed"]
    written = {"files": [str(path) for path in redrawn.paths], "skipped": list(redrawn.skipped)}
    return {"text": "\n".join([*lines, *redrawn.skipped]), "json": written}


def _verify(arguments: argparse.Namespace) -> Result:
    found = verify(arguments.folder or find_folder())
    what = f"{found.num_figures} figures from {found.num_runs} runs"
    last = f"{what}: {len(found.problems)} problems" if found.problems else f"{what}: as recorded"
    return {
        "text": "\n".join([*found.problems, *found.notes, last]),
        "json": {
            "figures": found.num_figures,
            "runs": found.num_runs,
            "problems": list(found.problems),
            "notes": list(found.notes),
        },
        "code": 1 if found.problems else 0,
    }
