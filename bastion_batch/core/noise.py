"""Keys of the sampling noise: a function of (seed, row, sample), never of where a row is decoded."""

from hashlib import blake2b

NOISE_VERSION = 1
"""Raised when the same key would give other noise; part of a job's identity."""

MASK_64 = (1 << 64) - 1


def row_key(seed: int, row_id: str, sample_index: int) -> int:
    """The 64-bit noise key of one sample of one row: BLAKE2b of its three names."""
    name = f"{seed}\0{row_id}\0{sample_index}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def position_key(key: int, position: int) -> int:
    """The 64-bit key of one absolute position of a row: one SplitMix64 step.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return z ^ (z >> 31)
