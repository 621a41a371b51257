"""Figures: one function per figure, from a run (or several) to a plotly Figure.

Each figure has two functions. The one named after the figure takes a `Run`, or an ordered mapping
{name: Run}, and calls `stats` (figures of benchmarks and of the battery take `results.Results`
instead); its `draw_*` half is pure and takes the tables that `stats` returned, so a figure can be
drawn again from stored tables. Units, n, intervals and the run stand on the figure; one or two
sentences on what it shows are in `layout.meta["caption"]`. Nothing here imports torch, and plotly
is imported when a figure is drawn, not before.
"""

from dflash2_lab.plots.acceptance import acceptance_by_policy, draw_acceptance
from dflash2_lab.plots.attention import attention_share, draw_attention
from dflash2_lab.plots.attention_map import attention_map, draw_attention_map
from dflash2_lab.plots.block import draw_block
from dflash2_lab.plots.cycle import cycle_breakdown, draw_cycle
from dflash2_lab.plots.decay import draw_decay, suffix_decay
from dflash2_lab.plots.detection import draw_detection, tokens_to_detection
from dflash2_lab.plots.headroom import draw_headroom, headroom_by_k
from dflash2_lab.plots.monitor import draw_monitor, monitor_path
from dflash2_lab.plots.recall import draw_recall, recall_by_slot
from dflash2_lab.plots.selector import draw_recovery, selector_recovery
from dflash2_lab.plots.share_recall import draw_share_recall, share_against_recall
from dflash2_lab.plots.template import register_templates
from dflash2_lab.plots.throughput import draw_throughput, throughput_by_concurrency

__all__ = [
    "acceptance_by_policy",
    "attention_map",
    "attention_share",
    "cycle_breakdown",
    "draw_acceptance",
    "draw_attention",
    "draw_attention_map",
    "draw_block",
    "draw_cycle",
    "draw_decay",
    "draw_detection",
    "draw_headroom",
    "draw_monitor",
    "draw_recall",
    "draw_recovery",
    "draw_share_recall",
    "draw_throughput",
    "headroom_by_k",
    "monitor_path",
    "recall_by_slot",
    "register_templates",
    "selector_recovery",
    "share_against_recall",
    "suffix_decay",
    "throughput_by_concurrency",
    "tokens_to_detection",
]
