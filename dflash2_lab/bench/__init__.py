"""Benchmarks: what recording, a decode cycle, a decode and single kernels cost, with intervals."""
