"""Step 1, moments: how a weight's tiles are shared out among Hopper's programs. No Triton here."""

from __future__ import annotations


def shares(
    tiles: int, samples: int, positions: float, programs: int, launch_us: float, most_parts: int
) -> tuple[int, int]:
    """(whole, share): how many tiles run whole, and how many samples a part of the others has; the cheapest by a model.

    144 tiles (3072 x 768) on 132 multiprocessors would take two rounds; 132 whole and 12 in eighths take 1.125.
    """
    sample_us = 5.4e-3 * positions + 0.3  # H200: one sample of a 128 x 128 tile
    best = (-(-tiles // programs) * samples * sample_us, tiles, samples)
    parts = {-(-samples // n_parts) for n_parts in range(2, min(samples, most_parts) + 1)}
    for rounds in range(max(0, tiles // programs - 1), tiles // programs + 1):
        rest = tiles - rounds * programs
        for share in parts if rest else ():
            total = rest * -(-samples // share)
            join_us = launch_us + 0.1 * total  # 128 kB a part written and read, less shared in L2
            turns = rounds * samples + -(-total // programs) * share
            best = min(best, (turns * sample_us + join_us, rounds * programs, share))
    return best[1], best[2]
