"""A simulated cluster: token rates instead of GPUs, the product's own decisions, the time it takes."""
