"""What `verify --drafter` does: decodes with every arm and writes the certificate."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from dflash2_lab.commands import Result, device_of, target_of, template_options
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.campaign import QUICK, campaign
from dflash2_lab.losslessness.campaign import as_json as campaign_json
from dflash2_lab.losslessness.campaign import page as campaign_page
from dflash2_lab.losslessness.certificate import as_json, page
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS
from dflash2_lab.losslessness.greedy import verify_greedy
from dflash2_lab.losslessness.greedy_certificate import as_json as greedy_json
from dflash2_lab.losslessness.greedy_certificate import page as greedy_page
from dflash2_lab.losslessness.mutation import mutation_score
from dflash2_lab.losslessness.verifying import Plan, plan_of, verify
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import drafter_info, load_drafter
from dflash2_lab.prompts import Prompt, load_prompts, prompt_set_hash
from dflash2_lab.provenance import environment
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import open_folder, write_atomic, write_run_info
from dflash2_lab.target import Target

CERTIFICATE = "certificate.json"
PAGE = "certificate.txt"


def verify_decode(arguments: argparse.Namespace) -> Result:
    """Verify our own decode; exit code 1 when it is not the target's law."""
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    samplings = [Sampling(temperature, arguments.top_p, arguments.top_k)]
    samplings += map(_configuration, arguments.also)
    greedy = any(one.greedy for one in samplings)
    if (greedy or arguments.mutation_score) and (arguments.also or arguments.inject is not None):
        raise LabError(
            "--temperature 0 and --mutation-score: found --also or --inject beside one of them, "
            "expected neither"
        )
    planted = arguments.acceptance == "token" and arguments.engine in (None, "eager")
    if arguments.mutation_score and not planted:
        raise LabError(
            f"--mutation-score: found --acceptance {arguments.acceptance} and --engine "
            f"{arguments.engine or 'eager'}, expected token and eager, where faults can be planted"
        )
    plan = replace(plan_of(arguments.level, arguments.seed), alpha=arguments.alpha)
    target = target_of(arguments)
    drafter = load_drafter(
        arguments.drafter, target=target, dtype=arguments.dtype, device=device_of(arguments)
    )
    prompts = load_prompts(
        arguments.prompts or "default",
        system=arguments.system,
        template_options=template_options(arguments.template_option),
        target=target,
        seed=arguments.seed,
    )
    info: dict[str, Any] = {
        "kind": "verify-decode",
        "target": dict(target.identity),
        "drafter": drafter_info(drafter),
        "prompt_set_hash": prompt_set_hash(target, prompts),
        "environment": environment(target.device),
        "complete": False,
    }
    if arguments.out is not None:
        open_folder(arguments.out, info)
    passed, text, record = _found(arguments, samplings, plan, target, drafter, prompts)
    if arguments.out is not None:
        payload = json.dumps(record, indent=1, sort_keys=True, default=float) + "\n"
        for name, content in ((CERTIFICATE, payload), (PAGE, text)):
            write_atomic(
                arguments.out / name, lambda handle, content=content: handle.write(content.encode())
            )
        write_run_info(arguments.out, info | {"passed": passed, "complete": True})
        text += f"\nrun folder: {arguments.out}"
        record |= {"folder": str(arguments.out)}
    return {"text": text, "json": record, "code": 0 if passed else 1}


def _found(
    arguments: argparse.Namespace,
    samplings: Sequence[Sampling],
    plan: Plan,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
) -> tuple[bool, str, dict[str, Any]]:
    """Whether the check passed, its page and its record."""
    if arguments.mutation_score:
        names = [*FAULTS, *CONTROLS]
        few = replace(QUICK, alpha=plan.alpha, seed=plan.seed)
        with tqdm(total=len(names), unit="decoder") as bar:

            def tell(name: str) -> None:
                bar.set_description(name)
                bar.update()

            found = campaign(
                target, drafter, prompts, policy=arguments.policy, sampling=samplings[0], plan=few,
                names=names, tell=tell,
            )  # fmt: skip
        return found.passed, campaign_page(found), campaign_json(found)
    how: dict[str, Any] = {
        "policy": arguments.policy,
        "plan": plan,
        "acceptance": arguments.acceptance,
        "engine": arguments.engine,
    }
    if samplings[0].greedy:
        how["engine"] = arguments.engine or "eager"  # the other one decodes the realistic arm only
        found = verify_greedy(target, drafter, prompts, **how)
        return found.passed, greedy_page(found), greedy_json(found)
    found = verify(target, drafter, prompts, sampling=samplings, inject=arguments.inject, **how)
    if arguments.inject is None:
        found = replace(found, mutation=mutation_score(seed=arguments.seed).to_dict())
    return found.passed, page(found), as_json(found)


def _configuration(text: str) -> Sampling:
    """Of `--also`. Raises `LabError` for anything but one to three numbers."""
    parts = text.split(",")
    try:
        numbers = [float(parts[0]), *map(float, parts[1:2]), *map(int, parts[2:])]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise LabError(
            f"--also: found {text!r}, expected temperature, top-p and top-k, such as 0.8,0.95,50"
        )
    return Sampling(*numbers)
