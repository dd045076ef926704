"""A worker's random numbers go on where they were."""

import torch

from gradwire.simulation.random_state import get_state, seed_worker, set_state

CPU = torch.device("cpu")


def test_a_saved_state_goes_on_also_as_a_row_of_all_workers_states() -> None:
    seed_worker(1, 0)
    torch.rand(7)
    states = torch.stack([get_state(CPU), get_state(CPU)])
    expected = torch.rand(5)
    for row in range(2):
        set_state(states[row], CPU)
        assert torch.equal(torch.rand(5), expected)


def test_seeds_ranks_and_steps_have_streams_of_their_own() -> None:
    draws = []
    for seed, rank, step in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (0, 0, 0)]:
        seed_worker(seed, rank, step)
        draws.append(float(torch.rand(())))
    assert len(set(draws)) == 4
    assert draws[0] == draws[-1]
