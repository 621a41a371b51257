"""What the run.json of a recording says.

It holds all that the numbers depend on, so a resumed or compared run can be checked against it.
"""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import drafter_info
from dflash2_lab.provenance import environment, token_hash
from dflash2_lab.tables import Run
from dflash2_lab.target import Target

if TYPE_CHECKING:
    from dflash2_lab.recording import RecordOptions

logger = logging.getLogger(__name__)


def run_info(
    target: Target, drafter: Drafter, traces: Run, options: "RecordOptions"
) -> dict[str, object]:
    """What run.json says: everything that the numbers depend on."""
    frame = traces.traces
    foreign = _other_weights(traces.info.get("target"), target.identity)
    if foreign:
        logger.warning(
            "%s, so they are marked off-policy: recall can be read, acceptance not", foreign
        )
    return {
        "kind": "record",
        "target": target.identity,
        "drafter": drafter_info(drafter),
        "sampling": traces.info["sampling"],
        "prompt_set_hash": traces.info.get("prompt_set_hash"),
        "token_hash": token_hash(frame),
        "template": traces.info.get("template"),
        "trace_target": traces.info.get("target"),
        "on_policy": bool(frame["on_policy"].all()) and not foreign,
        "num_requests": len(frame),
        "policies": list(options.policies),
        "anchor_stride": options.anchor_stride,
        "batch_size": options.batch_size,
        "keep_candidates": options.keep_candidates,
        "attention": options.attention,
        "attention_sample": options.attention_sample,
        "seeds": {"record": options.seed, "trace": traces.info.get("seed")},
        "environment": environment(target.device),
        "complete": False,
    }


def _other_weights(traced: Mapping[str, Any] | None, recorded: Mapping[str, Any]) -> str:
    """Says so when the traces are known to come from other weights than the target's, else ''."""
    sides = [
        {name: value for name, value in (side or {}).get("files", {}).items() if "tensors" in name}
        for side in (traced, recorded)
    ]
    if not all(sides) or sides[0] == sides[1]:
        return ""
    return f"the traces were made by target {traced['name']}, not by {recorded['name']}"
