"""What the bench commands do with their parsed arguments; see `commands`."""

import argparse

import torch

from dflash2_lab.bench.cycle import CycleOptions, bench_cycle
from dflash2_lab.bench.kernels import bench_kernels
from dflash2_lab.bench.record import bench_record
from dflash2_lab.bench.report import check_out
from dflash2_lab.bench.speedup import bench_speedup
from dflash2_lab.bench.throughput import ThroughputOptions, bench_throughput
from dflash2_lab.commands import Result, device_of, target_of, template_options
from dflash2_lab.prompts import load_prompts
from dflash2_lab.provenance import check_device
from dflash2_lab.tables import Run


def record(arguments: argparse.Namespace) -> Result:
    """Time recording."""
    check_out(arguments.out, "record")
    return bench_record(
        target_of(arguments),
        arguments.drafter,
        limit=arguments.limit,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        out=arguments.out,
    )


def cycle(arguments: argparse.Namespace) -> Result:
    """Time whole cycles."""
    check_out(arguments.out, "cycle")
    options = CycleOptions(
        batches=arguments.batch,
        num_drafts=arguments.num_draft,
        context=arguments.context,
        forced=arguments.forced,
        repeats=arguments.repeats,
        inner=arguments.inner,
        reference_cycles=arguments.reference_cycles,
    )
    return bench_cycle(arguments.shapes, _checked(arguments), options, arguments.out)


def throughput(arguments: argparse.Namespace) -> Result:
    """Tokens a second on prompts."""
    check_out(arguments.out, "throughput")
    options = ThroughputOptions(
        max_new_tokens=arguments.max_new_tokens,
        concurrency=arguments.concurrency,
        temperatures=arguments.temperature,
        repeats=arguments.repeats,
        sampler_batch=arguments.sampler_batch,
        reference=not arguments.no_reference,
    )
    target = target_of(arguments)
    prompts = load_prompts(
        arguments.prompts or "default",
        limit=arguments.limit,
        system=arguments.system,
        template_options=template_options(arguments.template_option),
        target=target,
    )
    drafters = arguments.drafter or ["zoo:dflash", "zoo:dflash2"]
    return bench_throughput(target, drafters, prompts, options, arguments.out)


def kernels(arguments: argparse.Namespace) -> Result:
    """Time single kernels."""
    check_out(arguments.out, "kernels")
    device = _checked(arguments)
    return bench_kernels(
        arguments.shapes, device, arguments.repeats, arguments.kernel, arguments.out
    )


def speedup(arguments: argparse.Namespace) -> Result:
    """Combine a recording with cycle times."""
    check_out(arguments.out, "speedup")
    run = Run.open(arguments.record_run, "record")
    return bench_speedup(run, arguments.cycle, arguments.out)


def _checked(arguments: argparse.Namespace) -> torch.device:
    device = device_of(arguments)
    check_device(device)
    return torch.device(device)
