"""Which kernels a cycle consists of, from the profiler.

It answers what a cycle waits for; the cycle itself is timed without a profiler.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dflash2_lab.bench.timing import wait

TURNS = {"cuda": 4, "cpu": 1}  # cycles that are profiled together


def kernel_times(step: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """Kernels of one step by total time: {"name", "count", "us"} per step, longest first.

    On a CPU these are torch's operations, each without those inside it. Kernels that overlap count
    in full each, so the sum may exceed the step's time. Empty when the profiler saw nothing.
    """
    on_gpu = device.type == "cuda"
    turns = TURNS[device.type]
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    wait(device)
    # Without `acc_events` torch warns that it forgets the events of earlier cycles; there is one.
    with profile(activities=[kind], acc_events=True) as profiler:
        for _ in range(turns):
            step()
        wait(device)
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    rows = [
        {
            "name": row.key,
            "count": row.count / turns,
            "us": (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / turns,
        }
        for row in profiler.key_averages()
        if row.device_type == wanted
    ]
    return sorted(rows, key=lambda row: -row["us"])
