"""Arithmetic only: what decides, on ints, lists and NumPy arrays. No device, file or cluster."""
