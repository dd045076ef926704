"""The recipe of SparseLoCo: what it is made of, and that rounds of it go where the workers' mean would have gone."""

from __future__ import annotations

import pytest
import torch

from gradwire.exchange.in_process import InProcess
from gradwire.layout import Layout
from gradwire.local_steps.outer_step import decay, outer_step
from gradwire.local_steps.recipe import recipe_of, sparseloco
from gradwire.methods import ChunkTopK

LAYOUT = Layout.of([("weight", (64, 128)), ("bias", (64,))])


def test_it_is_what_the_paper_says() -> None:
    recipe = sparseloco()
    assert recipe.compressor == ChunkTopK(chunk=4096, k=64, bits=2)
    assert (recipe.every, recipe.decay, recipe.outer_lr, recipe.outer_momentum) == (30, 0.95, 1.0, 0.0)
    assert recipe_of("sparseloco:every=15,decay=0.9") == sparseloco(15, decay=0.9)
    with pytest.raises(ValueError, match="no option momentum"):
        sparseloco(momentum=0.9)


def test_rounds_end_where_everything_sent_would_end() -> None:
    """Two workers pull towards targets that nearly agree, 1.6 % of the elements in a round."""
    recipe, both = sparseloco(), torch.randn(2, LAYOUT.numel, generator=torch.Generator().manual_seed(0))
    targets = both[0] + 0.1 * both
    wanted, base = targets.mean(0), torch.zeros(LAYOUT.numel)
    ranks, far = InProcess(recipe.compressor, LAYOUT, 2), []
    for _ in range(120):
        for state in ranks.states:
            decay(recipe, state.residual)
        deltas = [0.1 * (base - target) for target in targets]
        outer_step(recipe, base, ranks(deltas).mean, None)
        far.append(float((base - wanted).norm() / wanted.norm()))
    assert 0.6 < far[10] < 0.9
    assert 0.01 < far[-1] < 0.06  # what the two do not agree on keeps it moving
