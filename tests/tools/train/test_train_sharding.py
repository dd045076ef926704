"""Which worker takes which sample: every sample once, an order that (seed, epoch) alone decides, any resume point."""

import pytest
import torch

from gradwire.tools.train.sharding import batches, epoch_order, steps_left


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("samples", "batch"), [(1437, 16), (96, 8), (33, 1), (31, 5)])
def test_every_sample_once_an_epoch_but_for_the_ragged_tail(samples: int, batch: int, world: int) -> None:
    order = epoch_order(samples, seed=3, epoch=2)
    taken = [torch.cat(list(batches(order, rank, world, batch))) for rank in range(world)]
    assert len({len(part) for part in taken}) == 1, "all workers do the same number of steps"
    everything = torch.cat(taken)
    assert len(everything) == len(everything.unique()) == samples - samples % (world * batch)
    assert set(everything.tolist()) == set(order[: len(everything)].tolist())


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    assert torch.equal(epoch_order(100, 1, 2), epoch_order(100, 1, 2))
    assert not torch.equal(epoch_order(100, 1, 2), epoch_order(100, 2, 2))
    assert not torch.equal(epoch_order(100, 1, 2), epoch_order(100, 1, 3))
    assert not torch.equal(epoch_order(100, 1, 2), epoch_order(100, 2, 1))
    assert epoch_order(100, 1, 2).sort().values.tolist() == list(range(100))


def test_an_epoch_can_be_gone_on_with_in_the_middle() -> None:
    order = epoch_order(200, 0, 0)
    whole = [indices.tolist() for indices in batches(order, 1, 2, 8)]
    rest = [indices.tolist() for indices in batches(order, 1, 2, 8, position=5 * 16)]
    assert rest == whole[5:]


def test_another_number_of_workers_takes_what_is_left_of_the_epoch() -> None:
    order = epoch_order(200, 0, 0)
    before = [index for rank in range(2) for part in list(batches(order, rank, 2, 8))[:4] for index in part.tolist()]
    after = [index for rank in range(3) for part in batches(order, rank, 3, 8, position=64) for index in part.tolist()]
    assert not set(before) & set(after)
    assert len(set(after)) == len(after) == steps_left(200, 3, 8, 64) * 24
