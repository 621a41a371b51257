"""What `verify --drafter` does: decodes with every arm and writes the certificate."""

import argparse
import json
from dataclasses import replace
from typing import Any

from dflash2_lab.commands import Result, device_of, target_of, template_options
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.certificate import as_json, page
from dflash2_lab.losslessness.verifying import plan_of, verify
from dflash2_lab.models.io import drafter_info, load_drafter
from dflash2_lab.prompts import load_prompts, prompt_set_hash
from dflash2_lab.provenance import environment
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import open_folder, write_atomic, write_run_info

CERTIFICATE = "certificate.json"
PAGE = "certificate.txt"


def verify_decode(arguments: argparse.Namespace) -> Result:
    """Verify our own decode; exit code 1 when it is not the target's law."""
    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    sampling = Sampling(temperature, arguments.top_p, arguments.top_k)
    if sampling.greedy:
        raise LabError(
            "--temperature: found 0, expected more (greedy decodes: dflash2-lab verify-replay)"
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
    found = verify(
        target,
        drafter,
        prompts,
        policy=arguments.policy,
        sampling=sampling,
        plan=plan,
        acceptance=arguments.acceptance,
        inject=arguments.inject,
    )
    text, record = page(found), as_json(found)
    if arguments.out is not None:
        record |= {"environment": info["environment"]}
        payload = json.dumps(record, indent=1, sort_keys=True, default=float) + "\n"
        for name, content in ((CERTIFICATE, payload), (PAGE, text)):
            write_atomic(
                arguments.out / name, lambda handle, content=content: handle.write(content.encode())
            )
        write_run_info(arguments.out, info | {"passed": found.passed, "complete": True})
        text += f"\nrun folder: {arguments.out}"
        record |= {"folder": str(arguments.out)}
    return {"text": text, "json": record, "code": 0 if found.passed else 1}
