"""Checks as pages: the verdict first, then what was and was not shown, tests and sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab import plots
from dflash2_lab.html_page import (
    Table,
    facts,
    figure_block,
    page,
    paragraph,
    preformatted,
    provenance,
    section,
    warning_box,
)
from dflash2_lab.losslessness import sample_report
from dflash2_lab.losslessness.battery import holm_levels
from dflash2_lab.results import FAILED, read_results
from dflash2_lab.tables import Run

NOT_PASSED = "this check did NOT pass"
PRINTED = {
    "verify-enumeration": "Every branch of two blocks",
    "verify-against": "Two sample files",
    "verify-mutants": "Losslessness: the battery's score",
    "verify-replay": "Decode against replay",
}


def samples_page(run: Run) -> str:
    """The page of an audit of an engine's tokens, `verify --samples`."""
    found = read_results(run.folder, "verify-samples").values
    verdict = found["verdict"]
    sampled, greedy, noise = (found[key] for key in ("sampled", "greedy", "noise_band"))
    words = [f"{verdict}: {sample_report.VERDICTS[verdict]}."]
    words += [] if sampled is None else [sample_report.meaning(sampled)]
    rows = _size(found)
    if noise is not None:
        rows["noise band, logits (a tie is a gap of at most twice of it)"] = noise["band"]
    if greedy is not None:
        names = ("num_argmax", "num_ties", "num_bugs", "worst_argmax_gap")
        rows |= {name: greedy[name] for name in names}
    if sampled is not None:
        names = ("laws", "smallest_tv", "num_outside", "outside", "num_edge")
        rows |= {name: sampled[name] for name in names}
    tests = [] if sampled is None else [section("Tests", _audit_tests(sampled))]
    return checked_page(run, f"Audit of samples: {verdict}", head(found, "samples", "target"), [
        warning_box([*([NOT_PASSED] if verdict in FAILED else []), *found["notes"]]),
        section("Verdict", *map(paragraph, words)),
        *tests,
        section("Size and noise", facts(rows)),
    ])  # fmt: skip


def printed_page(run: Run) -> str:
    """The page of a check whose printed text says all: enumeration, comparison of two sample files,
    mutation score of the toy, decode against replay. Its last paragraph is the verdict."""
    kind = str(run.info["kind"])
    score = read_results(run.folder, kind)
    found = score.values
    *parts, verdict = _printed(kind, found).rstrip().split("\n\n")
    is_score = kind == "verify-mutants"
    figures = {"tokens_to_detection": plots.tokens_to_detection(score)} if is_score else {}
    body = [
        warning_box([NOT_PASSED] if found["verdict"] in FAILED else []),
        section("Verdict", paragraph(verdict)),
        *(section("Figures", figure_block(*named)) for named in figures.items()),
        section("Result", preformatted("\n\n".join(parts))),
    ]
    made = run.info.get("environment", {})
    about = head({**made, **run.info}, "acceptance", "device")
    return checked_page(run, f"{PRINTED[kind]}: {found['verdict']}", about, body, figures)


def _printed(kind: str, found: Mapping[str, Any]) -> str:
    if kind == "verify-replay":
        from dflash2_lab.verify_commands import verification_text  # imports torch

        return verification_text(found)
    texts = {
        "verify-enumeration": sample_report.enumeration_text,
        "verify-against": sample_report.comparison_text,
        "verify-mutants": sample_report.mutation_text,
    }
    return texts[kind](found)


def _audit_tests(part: Mapping[str, Any]) -> str:
    levels = holm_levels(part["p_values"], part["alpha"])
    rows = [
        [
            name,
            looks,
            short(part["p_values"][name]) + (" REJECTED" if name in part["rejected"] else ""),
            short(levels[name]),
        ]
        for name, looks in sample_report.LOOKS.items()
        if name in levels
    ]
    return Table(["test", "looks at", "p", "Holm level"], rows, keys=2).to_html()


def _size(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_samples", "num_prompts", "num_tokens", "num_stopped", "dtype", "device")
    return {name: found[name] for name in names}


def short(value: float | None) -> str:
    """Three significant digits, or "-" for what is not known."""
    return "-" if value is None else f"{value:.3g}"


def head(found: Mapping[str, Any], *names: str) -> str:
    """What stands below the title, as in "target smollm2-135m, policy selector"."""
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name))


def checked_page(
    run: Run, title: str, about: str, body: Sequence[str], figures: Mapping[str, Any] | None = None
) -> str:
    """The page of a check, its provenance last."""
    return page(title, about, [*body, provenance(run.info)], figures)
