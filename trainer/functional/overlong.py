"""Computes the punishment of samples that come close to the length limit."""

from trainer.functional.shapes import FloatN, IntN


def overlong_punishment(lengths: IntN, limit: int, buffer: int) -> FloatN:
    """Return DAPO's soft overlong punishment R_length of each sample, between -1 and 0.

    0 up to limit - buffer tokens, then (limit - buffer - |y|) / buffer, and -1 from `limit` on. Yu et al.
    2025 (arXiv 2503.14476), section 3.4, eq. 13, where `limit` is L_max and `buffer` L_cache.

    Args:
        lengths: int64 [N]: |y|, the tokens of each sample without its prompt.
        limit: tokens.
        buffer: tokens, at least 1.

    Returns:
        float32 [N].
    """
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()
