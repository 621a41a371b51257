"""A comparison as one page: every difference with its interval, the figures of both, provenance."""

from collections.abc import Mapping
from typing import Any

from dflash2_lab.comparison import Comparison, place, sections, verdict, with_interval
from dflash2_lab.html_page import (
    Table,
    facts,
    figure_block,
    page,
    paragraph,
    provenance,
    section,
    warning_box,
)
from dflash2_lab.html_report import HOW_TO_READ, dataset_words
from dflash2_lab.recording_figures import record_figures
from dflash2_lab.stats_paired import restrict, shared_prompts
from dflash2_lab.tables import Run

PAIRED = (
    "Both runs are cut to the prompts that they share, and every draw of the bootstrap takes the "
    "same prompts of both: what a prompt adds to both leaves the difference, so the interval of "
    "B - A is narrower than the two intervals beside it suggest, and those must not be used to "
    "judge it."
)
INDEPENDENT = (
    "A holds stored values, so nothing can be resampled together: the interval of B - A comes from "
    "the two intervals, as of independent samples. A difference is judged by it, never by a fixed "
    "tolerance."
)
MANY = (
    "Policy x/y is x of A and y of B. B is called higher or lower where the interval of B - A "
    "excludes 0; where nothing is said none was shown, which does not mean that there is none. "
    "Each interval covers 95 % by itself: of twenty differences that are none, about one is called "
    "higher or lower by chance, so decide before looking which one counts."
)


def comparison_page(comparison: Comparison, runs: tuple[Run, Run] | None = None) -> str:
    """The page of a comparison; the figures of both `runs` are over the prompts that they share."""
    a, b = comparison.names
    figures = {}
    if runs is not None:
        prompts = shared_prompts(*runs)
        cut = (restrict(run, prompts) for run in runs)
        figures = record_figures(dict(zip(comparison.names, cut, strict=True)))
    tables = [
        section(f"Differences: {title}", _differences(rows))
        for title, rows in sections(comparison.table).items()
    ]
    drawn = [figure_block(name, figure) for name, figure in figures.items()]
    sides = zip("AB", comparison.names, comparison.conditions, strict=True)
    body = [
        warning_box(comparison.warnings),
        *tables,
        section("Figures", *drawn) if drawn else "",
        section(
            "How to read this page",
            paragraph(PAIRED if comparison.paired else INDEPENDENT),
            paragraph(MANY),
            *map(paragraph, HOW_TO_READ[:3]),
        ),
        section("Conditions", *(_conditions(*side) for side in sides)),
        *(provenance(run.info) for run in runs or ()),
    ]
    words = "prompts in both" if comparison.paired else "prompts in the smaller of the two"
    about = f"A: {a}. B: {b}. {comparison.num_prompts} {words}."
    return page(f"{b} compared with {a}", about, body, figures)


def _differences(rows: Any) -> str:
    cells = [
        [
            ", ".join(word for word in (row.quantity.replace("_", " "), place(row)) if word),
            row.policy,
            with_interval(row.a, row.a_low, row.a_high),
            with_interval(row.b, row.b_low, row.b_high),
            with_interval(row.difference, row.low, row.high, signed=True),
            {"no difference shown": ""}.get(found := verdict(row._asdict()), found),
        ]
        for row in rows.itertuples(index=False)
    ]
    return Table(["quantity", "policy", "A", "B", "B - A", "B is"], cells, keys=2).to_html()


def _conditions(side: str, name: str, found: Mapping[str, Any]) -> str:
    shown = {"name": name, "prompts": dataset_words(found["datasets"]), **found}
    shown.pop("datasets")
    return f"<h3>{side}</h3>" + facts(shown)
