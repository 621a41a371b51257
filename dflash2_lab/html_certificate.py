"""Certificates as pages: the verdict and what it shows first, then gates, tests, sizes, levels."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash2_lab.html_page import Table, facts, paragraph, section, warning_box
from dflash2_lab.html_verify import NOT_PASSED, checked_page, head, short
from dflash2_lab.losslessness import certificate, greedy_certificate
from dflash2_lab.losslessness.battery import Budget, holm_levels
from dflash2_lab.losslessness.sample_report import LOOKS
from dflash2_lab.results import read_results
from dflash2_lab.tables import Run

TIERS = {"pit": "the tests of tokens", "component": "those of stages", "monitor": "the monitor"}
STAGES = {  # tests that need a drafter, as `sample_report.LOOKS`
    "slots": "place of the token in its block",
    "ad_drafter": "place of the token in the law, by the drafter's preference",
    "drafter_score": "tokens that the drafter prefers, against their expected number",
    "drafter_cells": "the drafter's first choice, more, less or no candidate of it",
    "draft_heat": "surprise of the drafts against the reported q",
    "draft_ad": "place of the drafts in the reported q",
    "accept_flags": "accepted drafts against their chance",
    "residual_ad": "tokens after a refusal",
    "bonus_ad": "tokens after a whole block",
}
LISTED = 10  # places of a greedy decode
GATES = (
    "Gates compare exact numbers, up to rounding; one step is enough to fail one. Tests look at "
    "the emitted tokens and at each stage; Holm's rule holds the smallest p-value of a family "
    "against its level divided by their number, the next against that divided by one less, and "
    "stops at the first that is above. docs/losslessness.md says what each looks at."
)
CAMPAIGN = (
    "Shown: which of the catalogue's faults, planted one at a time in the reference engine, the "
    "gates and tests condemn within so few tokens, and that harmless decoders pass. Not shown: "
    "that they would find a fault that is not in the catalogue, or with other models or settings."
)


def certificate_page(run: Run) -> str:
    """The page of `verify --drafter`: a certificate at T > 0 or T = 0, or the mutation score of the
    real engine. Raises LabError for a file that is missing or malformed."""
    found = read_results(run.folder, "verify-decode").values
    kinds = {"arms": _sampled, "eps": _greedy, "mutants": _campaign}
    kind = "eps" if "eps" in found else "mutants" if "mutants" in found else "arms"
    title, words, sections = kinds[kind](found)
    about = head(found["configuration"], "target", "drafter", "policy", "engine", "sampling")
    spent = f"It took {found['seconds']:.0f} s."
    return checked_page(run, f"{title}: {'passed' if found['passed'] else 'FAILED'}", about, [
        warning_box([] if found["passed"] else [NOT_PASSED]),
        section("Verdict", *map(paragraph, words)),
        *sections,
        section("What was run", facts(found["configuration"]), paragraph(spent)),
    ])  # fmt: skip


def _sampled(found: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    words = [certificate.meaning(found)]
    if found["mutation_score"] is not None:
        words.append(f"The tests catch {certificate.mutation_words(found['mutation_score'])}.")
    budget = Budget(**found["budget"])
    laws = dict.fromkeys(arm["sampling"] for arm in found["arms"])
    groups = {law: [arm for arm in found["arms"] if arm["sampling"] == law] for law in laws}
    tables = [
        section(f"{name}, {law}", table(arms, budget))
        for law, arms in groups.items()
        for name, table in (("Gates", _arm_gates), ("Tests", _arm_tests), ("Size", _sizes))
    ]
    split = {"alpha of the whole run": short(budget.alpha)}
    for tier, family in TIERS.items():
        split[f"level of {family}"] = short(budget.level(tier))
    split["smallest shift that a test of one known cell sees"] = short(found["smallest_tv"])
    looks = Table(["test", "looks at"], [*map(list, (LOOKS | STAGES).items())], keys=2)
    return "Losslessness certificate", words, [
        *tables, section("Levels", paragraph(GATES), facts(split), looks.to_html())
    ]  # fmt: skip


def _arm_gates(arms: Sequence[Mapping[str, Any]], _budget: Budget) -> str:
    rows = [
        [
            check["name"],
            check["meaning"],
            short(check["limit"]),
            *(_found(arm["checks"][row]) for arm in arms),
        ]
        for row, check in enumerate(arms[0]["checks"])
    ]
    return Table(["gate", "what is found", "limit", *_arms(arms)], rows, keys=2).to_html()


def _arm_tests(arms: Sequence[Mapping[str, Any]], budget: Budget) -> str:
    levels = [
        holm_levels(arm["pit"], budget.level("pit"))
        | holm_levels(arm["component"], budget.level("component"))
        for arm in arms
    ]
    rows = []
    for name in LOOKS | STAGES:
        row = [name]
        for arm, level in zip(arms, levels, strict=True):
            p = (arm["pit"] | arm["component"]).get(name)
            mark = " REJECTED" if name in arm["rejected"] else ""
            row += ["-", "-"] if p is None else [short(p) + mark, short(level[name])]
        rows += [row] if {*row[1:]} != {"-"} else []
    heads = [word for arm in _arms(arms) for word in (f"p, {arm}", "Holm level")]
    return Table(["test", *heads], rows).to_html()


def _sizes(arms: Sequence[Mapping[str, Any]], _budget: Budget) -> str:
    rows = [
        [
            arm["arm"],
            f"{arm['tokens']:,}",
            f"{arm['drafts']:,}",
            f"{arm['acceptance_length']:.2f}",
            short(arm["noise"]["median"]),
            short(arm["noise"]["max"]),
            str(arm["num_edge"]),
            short(arm["log_e"]),
            "never" if arm["stopped"] is None else f"after {arm['stopped']:,} tokens",
        ]
        for arm in arms
    ]
    header = ["drafter", "tokens", "drafts", "tokens a step", "noise, median", "noise, largest"]
    note = (
        "Noise band: total variation between the verifier's p and that of one plain pass, which is "
        "what rounding does here. At an edge: tokens that rounding puts on either side of a top-k "
        "or top-p cut. The monitor stops a run once its evidence E is large enough."
    )
    table = Table([*header, "at an edge", "log E", "monitor stopped"], rows)
    return table.to_html() + paragraph(note)


def _greedy(found: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    worst = found["worst_argmax_gap"]
    words = [f"{found['verdict']}: worst argmax gap {short(worst['gap'])} logits"]
    if worst["gap"]:
        words[0] += f" at prompt {worst['prompt_id']}, position {worst['position']}"
    words = [f"{words[0]}.", greedy_certificate.meaning(found)]
    arms = found["arms"]
    gates = [check | {"name": name} for name, check in _named(found)]
    sizes = [
        [
            arm["arm"],
            f"{arm['tokens']:,}",
            f"{arm['acceptance_length']:.2f}",
            str(arm["num_flips"]),
            short(arm["expected_flips"]),
            short(arm["flip_tail"]),
            str(len(arm["divergences"])),
        ]
        for arm in arms
    ]
    noise = [
        [
            one["way"],
            str(one["batch"]),
            f"{one['num']:,}",
            *(short(one[key]) for key in ("median", "quantile_99", "quantile_9999", "largest")),
            str(one["num_changed"]),
        ]
        for one in found["noise"]
    ]
    eps = found["eps"]
    header = ["drafter", "tokens", "tokens a step", "flips", "expected", "p of so many", "partings"]
    heads = ["way", "rows", "tokens", "median", "99 %", "99.99 %", "largest", "changed choices"]
    places = [place | {"arm": arm["arm"]} for arm in arms for place in arm["divergences"]]
    listed = [
        f"{one['arm']}: prompt {one['prompt_id']}, position {one['position']}, token "
        f"{one['token']}, best {one['best_token']}, gap {short(one['gap'])}"
        for one in places[:LISTED]
    ]
    if len(places) > LISTED:
        listed.append(f"and {len(places) - LISTED} more in certificate.json")
    return "Greedy losslessness certificate", words, [
        section("Gates", _gate_table(gates)),
        section("Tokens", Table(header, sizes).to_html(), *map(paragraph, listed)),
        section(
            "Noise of logits",
            Table(heads, noise).to_html(),
            paragraph(f"eps {short(eps)} logits; gaps up to {short(2 * eps)} are ties."),
        ),
    ]  # fmt: skip


def _named(found: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The gates of a greedy run, then those of its arms under their names."""
    own = [(check["name"], check) for check in found["checks"]]
    return own + [
        (f"{check['name']}, {arm['arm']}", check)
        for arm in found["arms"]
        for check in arm["checks"]
    ]


def _gate_table(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = [[c["name"], c["meaning"], short(c["limit"]), _found(c)] for c in checks]
    return Table(["gate", "what is found", "limit", "found"], rows, keys=2).to_html()


def _campaign(found: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    words = [
        f"{found['killed']} of {found['total']} faults caught, {found['controls_passed']} of "
        f"{found['controls']} harmless decoders passed, {found['false_alarms']} false alarms.",
        CAMPAIGN,
    ]
    return "Mutation score of the engine", words, [
        section("Faults", _attempts("fault", found["mutants"], "MISSED")),
        section("Harmless decoders", _attempts("decoder", found["controls_tried"], "FAILED")),
    ]  # fmt: skip


def _attempts(first: str, attempts: Sequence[Mapping[str, Any]], wrong: str) -> str:
    rows = []
    for one in attempts:
        spoke = ", ".join(f"{name} {short(value)}" for name, value in (one["spoke"] or {}).items())
        what = spoke or "nothing"
        if one["skipped"]:
            what = f"changes nothing here: {one['skipped']}"
        elif not one["passed"]:
            what += f" ({wrong})"
        rows.append([one["name"], one["stage"], one["arm"] or "-", what, f"{one['tokens']:,}"])
    return Table([first, "stage", "drafter", "what spoke", "tokens"], rows, keys=4).to_html()


def _arms(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    return [arm["arm"] for arm in arms]


def _found(check: Mapping[str, Any]) -> str:
    return short(check["found"]) + ("" if check["passed"] else " FAILED")
