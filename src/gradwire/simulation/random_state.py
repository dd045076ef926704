"""The random numbers of a worker (dropout): seeded by (seed, rank), saved and put back bit for bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def seed_worker(seed: int, rank: int, step: int = 0) -> None:
    """Start this worker's own stream; `step` makes another one after the number of workers has changed."""
    state = np.random.SeedSequence([seed, rank, step]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]) >> 1)


def get_state(device: torch.device) -> Tensor:
    """uint8: the CPU generator's state, then the GPU's."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return torch.cat(states)


def set_state(state: Tensor, device: torch.device) -> None:
    """Put back what `get_state` returned; a state from another kind of device restores the CPU's part."""
    cpu_bytes = len(torch.get_rng_state())
    torch.set_rng_state(state[:cpu_bytes].clone())  # torch 2.13 crashes on a view that begins inside its storage
    if device.type == "cuda" and len(state) > cpu_bytes:
        torch.cuda.set_rng_state(state[cpu_bytes:].clone(), device)
