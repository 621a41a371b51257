"""Which figures a recording has: one list for the main job, the figures command and the pages."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash2_lab import plots
from dflash2_lab.errors import LabError
from dflash2_lab.replaying import check_replayable
from dflash2_lab.tables import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

UNARY = ("recall_by_slot", "suffix_decay")
PATH = ("acceptance_by_policy", "headroom_by_k")
SELECTOR = ("selector_recovery",)
ATTENTION = ("attention_share", "attention_map", "share_against_recall")

logger = logging.getLogger(__name__)


def record_figures(runs: Mapping[str, Run]) -> "dict[str, Figure]":
    """Every figure that the tables of all these recordings, {name: run}, allow; by its name."""
    return {name: getattr(plots, name)(runs) for name in figure_names(runs)}


def figure_names(runs: Mapping[str, Run]) -> list[str]:
    """Names of the figures: acceptance needs a replay, the selector's one run that recorded it,
    attention its table in all runs. What is left out for want of a replay is logged."""
    names = list(UNARY)
    reasons = {name: why for name, run in runs.items() if (why := why_not_replayable(run))}
    for name, why in reasons.items():
        logger.warning("figures of acceptance are left out: run %r, %s", name, why)
    if not reasons:
        names += PATH
        if any({"selector", "top1"} <= {*run.policies} for run in runs.values()):
            names += SELECTOR
    if all(run.has_table("attention") for run in runs.values()):
        names += ATTENTION
    return names


def why_not_replayable(run: Run) -> str:
    """Why acceptance cannot be replayed from a recording; "" where it can."""
    try:
        check_replayable(run)
    except LabError as error:
        return str(error)
    return ""
