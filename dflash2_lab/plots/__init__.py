"""Figures: one function per figure, from a run (or several) to a plotly Figure.

Each figure has two functions. The one named after the figure takes a `Run`, or an ordered mapping
{name: Run}, and calls `stats`; its `draw_*` half is pure and takes the tables that `stats`
returned, so a figure can be drawn again from stored tables. Nothing here imports torch, and plotly
is imported when a figure is drawn, not before.
"""

from dflash2_lab.plots.acceptance import acceptance_by_policy, draw_acceptance
from dflash2_lab.plots.attention import attention_share, draw_attention
from dflash2_lab.plots.decay import draw_decay, suffix_decay
from dflash2_lab.plots.recall import draw_recall, recall_by_slot

__all__ = [
    "acceptance_by_policy",
    "attention_share",
    "draw_acceptance",
    "draw_attention",
    "draw_decay",
    "draw_recall",
    "recall_by_slot",
    "suffix_decay",
]
