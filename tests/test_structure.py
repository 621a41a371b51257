"""Who may import whom, and the public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dflash2_lab as lab

ROOT = Path(__file__).parents[1]
LIGHT = (
    *("errors", "schema", "tables", "blocks", "intervals", "stats", "plots", "figures"),
    *("browser", "report", "cli", "comparison", "conditions", "html_page", "html_report"),
    *("viewer", "viewer_block", "figure_manifest", "stats_headroom", "stats_attention"),
    *(
        "stats_paired",
        "stats_results",
        "results",
        "html_certificate",
        "html_results",
        "html_trace",
        "html_verify",
        "recording_figures",
        "figure_commands",
    ),
    *(f"losslessness.{name}" for name in ("statistics", "battery", "monitor", "toy")),
    *(f"losslessness.{name}" for name in ("two_sample", "sample_report", "flips")),
    *(f"losslessness.{name}" for name in ("certificate", "greedy_certificate")),
)


@pytest.mark.parametrize("name", LIGHT)
def test_statistics_and_plots_never_import_torch(name):
    heavy = ("torch", "transformers", "triton", "datasets")
    code = (
        f"import sys, dflash2_lab.{name}\n"
        f"assert not [module for module in {heavy} if module in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=lambda p: p.stem)
def test_kernels_import_neither_the_library_nor_transformers(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add("" if node.level else node.module.split(".")[0])
    allowed = ("torch", "triton", "jaxtyping", "collections", "dataclasses", "math", "typing")
    assert imported <= {"", *allowed}


def test_kernels_import_where_triton_is_not_installed():
    names = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
    code = (
        "import importlib, sys\n"
        "sys.modules['triton'] = None\n"
        f"for name in {names}: importlib.import_module('dflash2_lab.kernels.' + name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_functions_stay_functions_whatever_was_imported():
    # a module of the same name would replace the function as soon as something imports it
    import dflash2_lab.report
    import dflash2_lab.reproduce  # noqa: F401

    names = ("load_target", "load_drafter", "load_prompts", "trace", "record", "replay", "decode")
    for name in names:
        assert callable(getattr(lab, name)), name
    assert callable(lab.plots.recall_by_slot)


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = lab.nothing_like_it


def test_library_files_stay_short():
    files = (ROOT / "dflash2_lab").rglob("*.py")
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > 400} == {}
