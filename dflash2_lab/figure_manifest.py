"""The figures of record: a folder of figures, the tables they are drawn from, and a manifest.

`manifest.json` names for each figure the function of `plots` that draws it, its options and its
tables, and holds the hashes of what came out: the figure's JSON, the HTML built from it, pictures,
and every file of the runs. To add a figure, add an entry with `figure`, `draw`, `tables` (and
`options`, `images`) and redraw; everything else in the manifest is written by `redraw`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash2_lab import plots
from dflash2_lab.browser import ImageExportError
from dflash2_lab.errors import LabError
from dflash2_lab.figures import figure_html, figure_json, save_figure
from dflash2_lab.results import Results, read_results
from dflash2_lab.tables import RUN_INFO_FILE, Run, file_hash, read_run_info, write_atomic

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MANIFEST = "manifest.json"
README = "README.md"
COMMAND = "dflash2-lab figures"


@dataclass(frozen=True)
class Redrawn:
    """Files written, and one line for each picture that could not be made."""

    paths: tuple[Path, ...]
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Verified:
    """What a verification found: `problems` is empty when all is as the manifest says."""

    num_figures: int
    num_runs: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())


def find_folder() -> Path:
    """The figures/ folder of the clone that this package runs from.

    Raises:
        LabError: the package was installed without a clone, which has no figures of record.
    """
    folder = Path(__file__).resolve().parents[1] / "figures"
    if not (folder / MANIFEST).is_file():
        raise LabError(
            f"figures of record: {folder / MANIFEST} not found; they are part of a clone of the "
            "repository, not of the installed package: name the folder with --folder"
        )
    return folder


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        LabError: it is missing or malformed, or an entry lacks a field or names no figure.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LabError(f"{path}: not found, expected the manifest of the figures") from error
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: malformed ({error}), expected a JSON object") from error
    entries = manifest.get("figures") if isinstance(manifest, dict) else None
    if not isinstance(entries, list):
        raise LabError(f"{path}: found no list under 'figures', expected one")
    for index, entry in enumerate(entries):
        missing = [key for key in ("figure", "draw", "tables") if key not in entry]
        if missing:
            raise LabError(f"{path}: figure {index + 1} lacks {', '.join(missing)}")
        if entry["draw"] not in plots.__all__:
            raise LabError(
                f"{path}: figure {entry['figure']!r} is drawn by {entry['draw']!r}, expected a "
                "function of dflash2_lab.plots"
            )
        try:
            signature(getattr(plots, entry["draw"])).bind({}, **entry.get("options", {}))
        except TypeError as error:
            raise LabError(f"{path}: options of figure {entry['figure']!r}: {error}") from error
    return manifest


def redraw(folder: Path) -> Redrawn:
    """Draw every figure of the manifest again from its tables, and write the manifest anew.

    Files whose content would not change are left alone; pictures are made where their figure
    changed. Raises LabError as `read_manifest`, and for a table that cannot be read.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    opened: dict[str, Run | Results] = {}
    written: list[Path] = []
    skipped: list[str] = []
    entries = []
    for entry in manifest["figures"]:
        figure = _draw(folder, entry, opened)
        text = figure_json(figure)
        written += _write(folder / f"{entry['figure']}.json", text)
        images, told = _redraw_images(folder, entry, figure, _sha(text), written)
        skipped += told
        entries.append(
            {
                "figure": entry["figure"],
                "draw": entry["draw"],
                "options": entry.get("options", {}),
                "tables": entry["tables"],
                "json_sha256": _sha(text),
                "html_sha256": _sha(figure_html(text)),
                "images": images,
            }
        )
    anew = {
        "command": COMMAND,
        "plotly": _plotly_version(),
        "figures": entries,
        "runs": {name: _run_entry(folder / name) for name in _run_folders(folder)},
    }
    text = json.dumps(anew, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    written += _write(folder / MANIFEST, text)
    return Redrawn(tuple(written), tuple(skipped))


def verify(folder: Path) -> Verified:
    """Draw every figure again, in memory, and hold all bytes against the files and the manifest.

    A problem is a figure, its HTML, a picture or a table that is missing or other than the manifest
    says, and a file in the folder that it does not know. Nothing is written.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    runs = manifest.get("runs", {})
    problems, notes = _check_runs(folder, manifest), []
    same_plotly = manifest.get("plotly") == _plotly_version()
    if not same_plotly:
        notes.append(
            f"HTML not compared: it holds plotly.js of plotly {_plotly_version()} here and of "
            f"{manifest.get('plotly')} in the manifest"
        )
    opened: dict[str, Run | Results] = {}
    for entry in manifest["figures"]:
        problems += _check_figure(folder, entry, opened, same_plotly)
    problems += [
        f"{name}: not in the manifest, expected only what it names"
        for name in _files(folder)
        if name not in _known(manifest)
    ]
    return Verified(len(manifest["figures"]), len(runs), tuple(problems), tuple(notes))


def _draw(folder: Path, entry: Mapping[str, Any], opened: dict[str, Run | Results]) -> "Figure":
    for name in entry["tables"].values():
        if name not in opened:
            kind = read_run_info(folder / name).get("kind")
            is_record = kind == "record"
            opened[name] = Run.open(folder / name) if is_record else read_results(folder / name)
    tables = {label: opened[name] for label, name in entry["tables"].items()}
    return getattr(plots, entry["draw"])(tables, **entry.get("options", {}))


def _check_figure(
    folder: Path, entry: Mapping[str, Any], opened: dict[str, Run | Results], html: bool
) -> list[str]:
    name = f"{entry['figure']}.json"
    path = folder / name
    try:
        text = figure_json(_draw(folder, entry, opened))
    except LabError as error:
        return [f"{entry['figure']}: cannot be drawn: {error}"]
    problems = []
    if not path.is_file():
        problems.append(f"{name}: missing, expected the figure that its tables draw")
    elif path.read_bytes() != text.encode():
        problems.append(f"{name}: differs from what its tables draw")
    if entry.get("json_sha256") != _sha(text):
        problems.append(f"{entry['figure']}: the manifest has another sha256 of its JSON")
    if html and entry.get("html_sha256") != _sha(figure_html(text)):
        problems.append(f"{entry['figure']}: the manifest has another sha256 of its HTML")
    for suffix, image in entry.get("images", {}).items():
        picture = f"{entry['figure']}.{suffix}"
        problems += _check_file(folder, picture, image.get("sha256"))
        if image.get("drawn_from") != _sha(text):
            problems.append(f"{picture}: is a picture of another drawing of the figure")
    return problems


def _check_runs(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    problems = []
    runs = manifest.get("runs", {})
    for name, run in runs.items():
        for file, sha in run["files"].items():
            problems += _check_file(folder, f"{name}/{file}", sha)
    for entry in manifest["figures"]:
        problems += [
            f"{entry['figure']}: its run {name} is not in the manifest"
            for name in entry["tables"].values()
            if name not in runs
        ]
    return problems


def _check_file(folder: Path, name: str, sha: str | None) -> list[str]:
    path = folder / name
    if not path.is_file():
        return [f"{name}: missing, expected as in the manifest"]
    found = file_hash(path)
    if found == sha:
        return []
    return [f"{name}: changed, found sha256 {found[:12]}, the manifest has {str(sha)[:12]}"]


def _known(manifest: Mapping[str, Any]) -> set[str]:
    known = {MANIFEST, README}
    for entry in manifest["figures"]:
        known |= {f"{entry['figure']}.{suffix}" for suffix in ("json", *entry.get("images", {}))}
    for name, run in manifest.get("runs", {}).items():
        known |= {f"{name}/{file}" for file in run["files"]}
    return known


def _redraw_images(
    folder: Path, entry: Mapping[str, Any], figure: "Figure", sha: str, written: list[Path]
) -> tuple[dict[str, Any], list[str]]:
    images, skipped = {}, []
    for suffix, old in entry.get("images", {}).items():
        path = folder / f"{entry['figure']}.{suffix}"
        drawn_from = old.get("drawn_from")
        if drawn_from != sha or not path.is_file():
            try:
                written += save_figure(figure, path.with_suffix(""), (suffix,))
                drawn_from = sha
            except ImageExportError as error:
                skipped.append(f"{path.name}: {error}")
        found = file_hash(path) if path.is_file() else None
        images[suffix] = {"sha256": found, "drawn_from": drawn_from}
    return images, skipped


def _run_folders(folder: Path) -> list[str]:
    found = folder.rglob(RUN_INFO_FILE)
    return sorted(path.parent.relative_to(folder).as_posix() for path in found)


def _run_entry(folder: Path) -> dict[str, Any]:
    """Hashes of a run's files, and who made them; the id is that of its run.json."""
    info = read_run_info(folder)
    made = info.get("environment", {})
    files = {path.name: file_hash(path) for path in sorted(folder.iterdir()) if path.is_file()}
    run = {"id": files[RUN_INFO_FILE][:12], "kind": info.get("kind")}
    run |= {key: made.get(key) for key in ("command", "git", "date", "device")}
    return {"files": files, "run": run}


def _files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def _write(path: Path, text: str) -> list[Path]:
    """Write the file if its content changes; the paths written."""
    content = text.encode()
    if path.is_file() and path.read_bytes() == content:
        return []
    write_atomic(path, lambda handle: handle.write(content))
    return [path]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _plotly_version() -> str:
    from importlib.metadata import version

    return version("plotly")
