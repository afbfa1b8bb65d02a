"""Quantities in words."""


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
