"""What the kernels share on the host."""

from types import SimpleNamespace

import pytest
import torch

from dflash2_lab.kernels.tools import launches_early


@pytest.mark.parametrize(
    ("capability", "early"), [((8, 9), False), ((9, 0), True), ((10, 0), True)]
)
def test_kernels_launch_early_where_the_gpu_can(monkeypatch, capability, early):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert launches_early(SimpleNamespace(is_cuda=True, device="cuda:0")) is early


def test_nothing_launches_early_on_a_cpu():
    assert launches_early(torch.zeros(1)) is False
