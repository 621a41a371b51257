"""What each command does with its parsed arguments; returns text for people and JSON for programs.

A result is {"text": str, "json": dict}; `cli` prints one of them.
"""

import argparse
import dataclasses
from pathlib import Path

import torch

from dflash2_lab.errors import LabError
from dflash2_lab.models.inspect import inspect_checkpoint
from dflash2_lab.models.io import load_drafter
from dflash2_lab.policies import check_policies
from dflash2_lab.prompts import load_prompts
from dflash2_lab.recording import RecordOptions
from dflash2_lab.recording import record as record_traces
from dflash2_lab.replaying import check_replayable
from dflash2_lab.report import summarise, text_report
from dflash2_lab.reproduce import main_job
from dflash2_lab.tables import Run
from dflash2_lab.target import Target, load_target
from dflash2_lab.tracing import trace as trace_prompts
from dflash2_lab.tracing_import import import_traces, read_rows
from dflash2_lab.training.data import load_corpus
from dflash2_lab.training.loop import TrainConfig
from dflash2_lab.training.loop import train as train_drafter
from dflash2_lab.training.setup import choose_mask_token, new_drafter

Result = dict[str, object]


def device_of(arguments: argparse.Namespace) -> str:
    """--device, by default a GPU where there is one."""
    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")


def target_of(arguments: argparse.Namespace) -> Target:
    """The target of --target, in its --dtype."""
    return load_target(arguments.target, dtype=arguments.dtype, device=device_of(arguments))


def template_options(pairs: list[str]) -> dict[str, object]:
    """The options of --template-option KEY=VALUE, where true and false are no strings."""
    words = {"true": True, "false": False}
    options: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise LabError(f"--template-option: found {pair!r}, expected KEY=VALUE")
        options[key] = words.get(value.lower(), value)
    return options


def refuse_beside(arguments: argparse.Namespace, given: str, *others: str) -> None:
    """Raise LabError for options about prompts beside `given`, which already says what they are."""
    for name in others:
        if getattr(arguments, name) is not None:
            raise LabError(
                f"--{given} and --{name} exclude each other: --{given} fixes the prompts"
            )


def _traced(arguments: argparse.Namespace, target: Target, out: Path) -> Run:
    prompts = load_prompts(
        arguments.prompts or "default",
        limit=arguments.limit,
        system=arguments.system,
        template_options=template_options(arguments.template_option),
        target=target,
        seed=arguments.seed,
    )
    return trace_prompts(
        target,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        max_total=arguments.max_total,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        samples=arguments.samples,
        batch_size=arguments.trace_batch_size,
        out=out,
    )


def trace(arguments: argparse.Namespace) -> Result:
    """Trace prompts into a run folder, or import traces that were made elsewhere."""
    if arguments.import_file is None:
        run = _traced(arguments, target_of(arguments), arguments.out)
    else:
        refuse_beside(arguments, "import", "prompts", "limit", "system")
        run = import_traces(
            target_of(arguments),
            read_rows(arguments.import_file),
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            out=arguments.out,
        )
    frame = run.traces
    counts = {
        "folder": str(arguments.out),
        "num_requests": len(frame),
        "num_response_tokens": int(frame["response_ids"].map(len).sum()),
        "finish": frame["finish"].value_counts().sort_index().to_dict(),
        "num_off_policy": int((~frame["on_policy"]).sum()),
        "prompt_set_hash": run.info.get("prompt_set_hash"),
    }
    text = (
        f"{counts['num_requests']} responses, {counts['num_response_tokens']} tokens "
        f"({', '.join(f'{n} {why}' for why, n in counts['finish'].items())}) in {arguments.out}"
    )
    return {"text": text, "json": counts}


def record(arguments: argparse.Namespace) -> Result:
    """Record a drafter on a trace run, or on prompts that are traced first."""
    traces = None
    if arguments.traces is not None:
        refuse_beside(arguments, "traces", "prompts", "limit", "system")
        traces = Run.open(arguments.traces, "trace")
    target = target_of(arguments)
    drafter = load_drafter(
        arguments.drafter, target=target, dtype=arguments.dtype, device=device_of(arguments)
    )
    options = {
        "anchor_stride": arguments.anchor_stride,
        "keep_candidates": arguments.keep_candidates,
        "batch_size": arguments.batch_size,
        "memory_gb": arguments.memory_gb,
        "attention": not arguments.no_attention,
        "attention_sample": arguments.attention_sample,
        "seed": arguments.seed,
    }
    # Tracing can take hours: a bad option is told before it.
    check_policies(arguments.policy or ("top1",), drafter.settings.kind)
    RecordOptions(("top1",), **options)
    if traces is None:
        traces = _traced(arguments, target, arguments.out / "traces")
    run = record_traces(
        target, drafter, traces, policies=arguments.policy or None, out=arguments.out, **options
    )
    try:
        check_replayable(run)
    except LabError as error:
        text = f"recorded; acceptance cannot be replayed: {error}\n{arguments.out}"
        return {"text": text, "json": {"folder": str(arguments.out)}}
    summary = summarise(run)
    text = text_report({drafter.name: summary}) + f"\nrun folder: {arguments.out}"
    return {"text": text, "json": summary | {"folder": str(arguments.out)}}


def replay(arguments: argparse.Namespace) -> Result:
    """Replay policies of a recorded run."""
    run = Run.open(arguments.folder, "record")
    summary = summarise(
        run,
        arguments.policy or None,
        num_draft=arguments.num_draft,
        acceptance=arguments.acceptance,
    )
    text = text_report({summary["drafter"]: summary})
    if len(arguments.policy) == 1:
        # One policy: its object alone, under the keys of the vocabulary.
        shared = {key: value for key, value in summary.items() if key != "policies"}
        summary = shared | summary["policies"][arguments.policy[0]]
    return {"text": text, "json": summary}


def train(arguments: argparse.Namespace) -> Result:
    """Train a fresh drafter on traces."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{k: v for k, v in vars(arguments).items() if k in names})
    corpus, validation = load_corpus(arguments.data, config.max_length, config.held_out)
    target = target_of(arguments)
    corpora = (corpus, validation)
    drafter = new_drafter(
        target,
        arguments.kind,
        mask_token_id=choose_mask_token(target, corpora, arguments.mask_token_id),
        num_layers=arguments.num_layers,
        intermediate_size=arguments.intermediate_size,
        block_size=arguments.block_size,
        seed=config.seed,
    )
    report = train_drafter(target, drafter, corpus, validation, config, arguments.out)
    text = (
        f"{arguments.kind} trained for {config.steps} steps on {corpus.num_response_tokens} "
        f"response tokens; validation recall@1 by slot: "
        f"{' '.join(f'{value:.3f}' for value in report['recall@1'])}\n"
        f"drafter: {arguments.out / 'drafter'}"
    )
    return {"text": text, "json": report | {"drafter": str(arguments.out / "drafter")}}


def inspect(arguments: argparse.Namespace) -> Result:
    """Show a checkpoint and its problems."""
    target = None if arguments.target is None else load_target(arguments.target)
    inspection = inspect_checkpoint(arguments.checkpoint, target)
    return {
        "text": inspection.to_text(),
        "json": inspection.to_dict(),
        "code": 2 if inspection.problems else 0,
    }


def reproduce(arguments: argparse.Namespace) -> Result:
    """The main job."""
    return main_job(
        target_of(arguments),
        drafters=tuple(arguments.drafter) or ("zoo:dflash", "zoo:dflash2"),
        limit=arguments.limit,
        max_new_tokens=arguments.max_new_tokens,
        out=arguments.out,
    )
