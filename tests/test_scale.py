"""The coordinator at a hundredth of its scale; `make scale` runs the whole."""

import pytest

from bastion_batch.bench.simulation.scale import ScaleConfig, measure_scale

GIGABYTE = 10**9


def test_a_hundredth_of_the_scale():
    report = measure_scale(ScaleConfig(num_workers=10, num_rows=100_000))
    assert report["cpu_seconds"] < 10
    assert report["makespan_over_bound"] < 1.25
    assert report["calls_per_worker_second"] <= 1.0


@pytest.mark.slow
def test_a_tenth_of_the_scale():
    report = measure_scale(ScaleConfig(num_workers=100, num_rows=1_000_000))
    assert report["makespan_over_bound"] < 1.25
    assert report["calls_per_worker_second"] <= 1.0
    assert report["peak_bytes"] < 2 * GIGABYTE  # pytest and its plugins are in it
