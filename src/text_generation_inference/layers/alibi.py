"""ALiBi: scores fall with distance, for each head by a slope of its own."""


def alibi_slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """A geometric series for a power of two of heads; the heads beyond it take every second of twice as many."""
    count = 1 << (num_heads.bit_length() - 1)  # the largest power of two that is no more
    slopes = [2.0 ** (-bias_max * i / count) for i in range(1, count + 1)]
    between = [2.0 ** (-bias_max * i / (2 * count)) for i in range(1, 2 * count, 2)]
    return tuple([*slopes, *between][:num_heads])
