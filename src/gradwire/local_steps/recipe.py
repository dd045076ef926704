"""What local steps are made of: a method, how many steps a round has, the outer step; and the recipes of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from gradwire.methods.base import Compressor
from gradwire.methods.chunk_topk.definition import ChunkTopK
from gradwire.methods.dense import Dense
from gradwire.methods.table import METHODS, compressor_of, parsed
from gradwire.methods.vgc import VGC

BUFFERS = ("average", "keep")


@dataclass(frozen=True)
class Recipe:
    """Every worker trains alone for `every` steps; what they add up to is compressed, and the base weights step.

        delta = base - weights                  on each worker, after `every` steps of its own optimizer
        e = decay e + delta                     its error feedback, where the method holds something back
        message = compress(e); e -= message
        u = mean over the workers of the messages
        m = outer_momentum m + u
        base -= outer_lr (u + outer_momentum m) with nesterov, else outer_lr m
        weights = base

    method: any of the library's, or its spec.
    every: inner steps of a round, H.
    outer_lr, outer_momentum, nesterov: of the outer step.
    decay: what remains of the error feedback from round to round.
    fragments: the layers go in so many parts, one after another, each once in `every` steps.
    delay: inner steps that a round's sum may be on its way while training goes on.
    mixing: with a delay, w = mixing w + (1 - mixing) base when the sum has come; None: w = base + what the worker did
        in the meantime.
    buffers: "average": batch-norm statistics become the workers' mean at the end of a round; "keep": each its own.
    """

    method: Compressor | str
    every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = True
    decay: float = 0.95
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    buffers: str = "average"

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", compressor_of(self.method))
        _whole("every", self.every, 1)
        _whole("fragments", self.fragments, 1)
        _whole("delay", self.delay, 0)
        if not 0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr must be a finite number > 0, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")
        if self.delay >= self.every:
            raise ValueError(
                f"delay ({self.delay}) must be less than every ({self.every}): a round's sum has to be there before "
                "the next round of the same layers begins"
            )
        if self.mixing is not None and not 0 <= self.mixing <= 1:
            raise ValueError(f"mixing must be in [0, 1], or None, got {self.mixing}")
        if self.compressor.needs_moments:
            raise ValueError(
                f"local steps add up weights, which have no second moments by sample, and {self.compressor!r} needs "
                "them: give alpha=0 with a density, VGC(alpha=0, density=1/32)"
            )
        if self.compressor.most_rate is not None:
            raise ValueError(
                f"local steps have no time of a step of their own, and {self.compressor!r} wants a rate: give "
                "max_bytes_per_step, of an inner step on average"
            )
        if self.buffers not in BUFFERS:
            raise ValueError(f"buffers must be one of {', '.join(BUFFERS)}, got {self.buffers!r}")

    @property
    def compressor(self) -> Compressor:
        assert isinstance(self.method, Compressor)
        return self.method


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def diloco(every: int = 500, **options: Any) -> Recipe:
    """DiLoCo (Douillard et al., arXiv:2311.08105): nothing is compressed, Nesterov's momentum outside.

        u = mean(delta);  m = 0.9 m + u;  base -= 0.7 (u + 0.9 m)

    The paper takes 500 inner steps of AdamW. A later one (arXiv:2503.09799) takes 30, and outer_lr 0.4 for one worker,
    0.6 for two and four, 0.8 for eight.
    """
    return _changed(Recipe(Dense(), 500, outer_lr=0.7, outer_momentum=0.9), {"every": every, **options})


def streaming_diloco(every: int = 100, **options: Any) -> Recipe:
    """Streaming DiLoCo (Douillard et al., arXiv:2501.18512): layers in turn, a late sum, 4 bits an element.

        u = mean(E3M0(delta));  m = 0.9 m + u;  base -= 0.4 (u + 0.9 m)
        w = 0.5 w + 0.5 base, up to 5 inner steps later

    E3M0 is a sign and three bits of exponent, which is VGC's code; without error feedback, as in the paper. The paper's
    fragments have three layers each: give fragments=n for n of them; 4 is that of twelve layers.
    """
    codes = VGC(alpha=0, density=1.0)
    recipe = Recipe(codes, 100, 0.4, 0.9, decay=0.0, fragments=4, delay=5, mixing=0.5)
    return _changed(recipe, {"every": every, **options})


def sparseloco(every: int = 30, **options: Any) -> Recipe:
    """SparseLoCo (Sarfi et al., arXiv:2508.15706): the largest of every chunk in 2 bits, no momentum outside.

        e = 0.95 e + delta;  message = Q(top 64 of every 4096 of e);  e -= message
        base -= mean(message)

    The paper takes 15 to 50 inner steps of AdamW and sends 1 to 3 % of each chunk: 64 x 64 tiles of a matrix, 4096
    elements of a vector; here all chunks are 4096 consecutive elements. The mean is over all workers, as in the paper;
    its public code divides an element by the number of those that sent it.
    """
    return _changed(Recipe(ChunkTopK(4096, 64, 2), every), options)


RECIPES: dict[str, Callable[..., Recipe]] = {
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "sparseloco": sparseloco,
}


def recipe_of(given: Recipe | Compressor | str, **options: Any) -> Recipe:
    """A recipe; its spec, "diloco:every=30" or "vgc:alpha=0,density=0.03,every=30"; or a method, and `every`.

    `options` that are not None change it.
    """
    options = {name: value for name, value in options.items() if value is not None}
    if isinstance(given, str):
        given, written = split_spec(given)
        options = {**written, **options}
        if given in RECIPES:
            return RECIPES[given](**options)
    if isinstance(given, Recipe):
        return _changed(given, options)
    if "every" not in options:
        raise ValueError(f"local steps need every=, the inner steps of a round; {', '.join(RECIPES)} bring their own")
    return _changed(Recipe(given, options.pop("every")), options)


def is_recipe(given: object) -> bool:
    """Whether it says by itself how many inner steps a round has: a recipe, or the spec of one."""
    if not isinstance(given, str):
        return isinstance(given, Recipe)
    name, options = split_spec(given)
    return name in RECIPES or "every" in options


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """What of a spec names the method (or a recipe), and the options that are of local steps."""
    name, _, rest = spec.strip().partition(":")
    kinds = {key: kind for key, kind in get_type_hints(Recipe).items() if key != "method"}
    parts = [part for part in rest.split(",") if part.strip()]
    ours = [part for part in parts if part.partition("=")[0].strip() in kinds]
    theirs = ",".join(part for part in parts if part not in ours)
    if theirs and name.lower() in RECIPES:
        raise ValueError(f"{name} has no option {theirs!r}; known: {', '.join(kinds)}")
    name = name.lower() if name.lower() in RECIPES else name
    return (f"{name}:{theirs}" if theirs else name), parsed(name, ",".join(ours), kinds)


def _changed(recipe: Recipe, options: dict[str, Any]) -> Recipe:
    known = {field.name for field in fields(Recipe)}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"local steps have no option {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return replace(recipe, **options)


assert not RECIPES.keys() & METHODS.keys()
