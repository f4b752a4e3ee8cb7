"""Measurements: what `bastion-batch bench` runs. Recorded figures live in `benchmarks/`."""
