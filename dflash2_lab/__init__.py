"""dflash2_lab: where does a block-parallel drafter lose acceptance, and what does each fix buy?

The flow, one function a step; a `Run` is what most of them return and take:

    load_target, load_drafter, load_prompts    a target, a drafter, prompts
    trace, import_traces                       the target's own continuations, or another tool's
    record                                     what a drafter does at every anchor of traces
    replay                                     acceptance of a policy from a recording, exactly
    decode                                     the real draft-verify loop
    verify, verify_greedy                      whether decoding is lossless
    compare, write_report, plots, block_viewer two drafters, a page, figures, single blocks
    save_drafter                               a drafter as a checkpoint

What is wrong with the input is a `LabError`. These names are the public surface; each is imported
on first use, so that statistics and plots never pull in torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash2_lab import plots
    from dflash2_lab.comparison import compare
    from dflash2_lab.decoding.api import decode
    from dflash2_lab.errors import LabError
    from dflash2_lab.losslessness.greedy import verify_greedy
    from dflash2_lab.losslessness.verifying import verify
    from dflash2_lab.models.io import load_drafter, save_drafter
    from dflash2_lab.prompts import load_prompts
    from dflash2_lab.recording import record
    from dflash2_lab.replaying import replay
    from dflash2_lab.report_commands import write_report
    from dflash2_lab.tables import Run
    from dflash2_lab.target import load_target
    from dflash2_lab.tracing import trace
    from dflash2_lab.tracing_import import import_traces
    from dflash2_lab.viewer import block_viewer

__all__ = [
    "LabError",
    "Run",
    "block_viewer",
    "compare",
    "decode",
    "import_traces",
    "load_drafter",
    "load_prompts",
    "load_target",
    "plots",
    "record",
    "replay",
    "save_drafter",
    "trace",
    "verify",
    "verify_greedy",
    "write_report",
]


def __dir__() -> list[str]:
    """Public names too before their first use, for completion and help()."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    homes = {
        "LabError": "errors",
        "Run": "tables",
        "block_viewer": "viewer",
        "compare": "comparison",
        "decode": "decoding.api",
        "import_traces": "tracing_import",
        "load_drafter": "models.io",
        "load_prompts": "prompts",
        "load_target": "target",
        "record": "recording",
        "replay": "replaying",
        "save_drafter": "models.io",
        "trace": "tracing",
        "verify": "losslessness.verifying",
        "verify_greedy": "losslessness.greedy",
        "write_report": "report_commands",
    }
    if name == "plots":
        return import_module("dflash2_lab.plots")
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
