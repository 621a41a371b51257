"""What the verify command does: audits samples of any engine, or scores the battery itself."""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from dflash2_lab.commands import Result, target_of, template_options
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.certificate import finite
from dflash2_lab.losslessness.sample_file import Sample, assume_sampling, read_samples
from dflash2_lab.losslessness.sample_report import (
    audit_text,
    comparison_text,
    enumeration_text,
    mutation_text,
)
from dflash2_lab.losslessness.sample_rows import resolve
from dflash2_lab.losslessness.samples import audit_samples
from dflash2_lab.losslessness.two_sample import compare_outputs
from dflash2_lab.provenance import environment
from dflash2_lab.results import FAILED
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import file_hash, open_folder, write_atomic, write_run_info
from dflash2_lab.verify_decode_commands import verify_decode

VERIFY_FILE = "verify.json"


def verify(arguments: argparse.Namespace) -> Result:
    """Audit samples against the target or each other, or score the battery; exit code 1 for a
    failed check."""
    if arguments.against is not None and arguments.samples is None:
        raise LabError("--against FILE: expected --samples FILE beside it")
    asked = (
        arguments.drafter is not None,
        arguments.samples is not None,
        arguments.enumerate,
        arguments.mutation_score and arguments.drafter is None,
    )
    if sum(asked) != 1:
        raise LabError(
            "expected one of --drafter DRAFTER, --samples FILE, --enumerate and --mutation-score"
        )
    if not 0 < arguments.alpha < 1:
        raise LabError(f"--alpha: found {arguments.alpha}, expected a number between 0 and 1")
    if arguments.inject is not None and arguments.drafter is None:
        raise LabError("--inject NAME: expected --drafter DRAFTER beside it")
    if arguments.drafter is not None:
        return verify_decode(arguments)
    if arguments.enumerate:
        return _enumeration(arguments)
    if arguments.mutation_score:
        return _mutation_score(arguments)
    return _audit(arguments) if arguments.against is None else _compare(arguments)


def _audit(arguments: argparse.Namespace) -> Result:
    sampling = None
    if arguments.temperature is not None:
        sampling = Sampling(arguments.temperature, arguments.top_p, arguments.top_k)
    samples = assume_sampling(read_samples(arguments.samples), sampling)
    target = target_of(arguments)
    options = template_options(arguments.template_option)
    rows, notes = resolve(target, samples, arguments.system, options)
    device = environment(target.device)
    info = {
        "kind": "verify-samples",
        "target": dict(target.identity),
        "eos_token_ids": sorted(target.eos_token_ids),
        "sampling": None if sampling is None else asdict(sampling),
        "template": {"system": arguments.system, "options": options},
        "samples_sha256": file_hash(arguments.samples),
        **{name: getattr(arguments, name) for name in ("alpha", "level", "seed")},
        "environment": device,
        "complete": False,
    }
    head = {
        "samples": str(arguments.samples),
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device["device"],
        "notes": notes,
    }
    if arguments.out is not None:
        open_folder(arguments.out, info)
    result = head | audit_samples(target, rows, arguments.alpha, arguments.level, arguments.seed)
    return _finish(arguments, info, result, audit_text(result))


def _compare(arguments: argparse.Namespace) -> Result:
    files = arguments.samples, arguments.against
    sides = [read_samples(path) for path in files]
    _check_alike(*sides)
    info = {
        "kind": "verify-against",
        "samples_sha256": [file_hash(path) for path in files],
        **{name: getattr(arguments, name) for name in ("alpha", "seed")},
        "environment": environment(torch.device("cpu")),
        "complete": False,
    }
    if arguments.out is not None:
        open_folder(arguments.out, info)
    test = compare_outputs(*map(_by_prompt, sides), seed=arguments.seed)
    result = {
        "samples": [str(path) for path in files],
        "unit": "tokens" if sides[0][0].output is None else "characters",
        "alpha": arguments.alpha,
        "verdict": test.verdict(arguments.alpha),
        **asdict(test),
    }
    return _finish(arguments, info, result, comparison_text(result))


def _check_alike(first: Sequence[Sample], second: Sequence[Sample]) -> None:
    """Raise LabError for sides that cannot be compared: text with ids, or other options."""
    known: dict[Any, Sample] = {}
    for sample in (*first, *second):
        if (sample.output is None) != (first[0].output is None):
            raise LabError(
                f"{sample.where}: found {'output_ids' if sample.output is None else 'output'}, but "
                f"{first[0].where} has the other one; expected the same in every line"
            )
        like = known.setdefault(sample.prompt_ids or sample.prompt, sample)
        if None not in (sample.sampling, like.sampling) and sample.sampling != like.sampling:
            raise LabError(
                f"{sample.where}: found {sample.sampling.label}, but {like.where} has "
                f"{like.sampling.label} for the same prompt; expected one law"
            )


def _enumeration(arguments: argparse.Namespace) -> Result:
    from dflash2_lab.losslessness.enumeration_cases import GATE, run_enumeration

    info = {
        "kind": "verify-enumeration",
        "environment": environment(torch.device("cpu")),
        "complete": False,
    }
    if arguments.out is not None:
        open_folder(arguments.out, info)
    rows = run_enumeration()
    result = {
        "verdict": "exact" if all(row.passed for row in rows) else "faulty",
        "gate": GATE,
        "rows": [row._asdict() | {"passed": row.passed} for row in rows],
    }
    return _finish(arguments, info, result, enumeration_text(result))


def _mutation_score(arguments: argparse.Namespace) -> Result:
    from dflash2_lab.losslessness.faults import CONTROLS, FAULTS
    from dflash2_lab.losslessness.mutation import mutation_score

    info = {
        "kind": "verify-mutants",
        "seed": arguments.seed,
        "environment": environment(torch.device("cpu")),
        "complete": False,
    }
    if arguments.out is not None:
        open_folder(arguments.out, info)
    with tqdm(total=len(FAULTS) + len(CONTROLS), desc="toy", unit="decoder", delay=2.0) as bar:
        score = mutation_score(seed=arguments.seed, progress=lambda _name: bar.update())
    failed = score.killed < score.total or score.false_alarms > 0
    result = {"verdict": "faulty" if failed else "complete"} | score.to_dict()
    return _finish(arguments, info, result, mutation_text(result))


def _by_prompt(samples: Sequence[Sample]) -> dict[Any, list[Any]]:
    found = defaultdict(list)
    for sample in samples:
        found[sample.prompt_ids or sample.prompt].append(sample.output or sample.output_ids)
    return dict(found)


def _finish(
    arguments: argparse.Namespace, info: Mapping[str, Any], result: dict[str, Any], text: str
) -> Result:
    """The run folder, if one was asked for, and the exit code."""
    code = 1 if result["verdict"] in FAILED else 0
    result = finite(result)
    if arguments.out is None:
        return {"text": text, "json": result, "code": code}
    payload = json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_atomic(arguments.out / VERIFY_FILE, lambda handle: handle.write(payload.encode()))
    write_run_info(arguments.out, info | {"verdict": result["verdict"], "complete": True})
    folder = {"folder": str(arguments.out)}
    text += f"\nrun folder: {arguments.out}"
    return {"text": text, "json": result | folder, "code": code}
