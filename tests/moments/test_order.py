"""A moment is complete before DDP hands over the bucket that holds its gradient, with many tiny buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.moments import Recorder

from .oracle import assert_equal, by_sample

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("static", [True, False])
def test_moments_are_complete_when_a_bucket_is_ready(static: bool, views: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4))]).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    truth = {
        size: by_sample(net, lambda s=size: [net(x[b : b + 1]).square().sum() for b in range(s)]) for size in (5, 3)
    }
    model = DistributedDataParallel(net, bucket_cap_mb=1e-5, gradient_as_bucket_view=views, static_graph=static)
    recorder = Recorder(model, dict(net.named_parameters()), strict=True)
    at_bucket: dict[str, Tensor] = {}
    buckets: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        known = {id(param): name for name, param in net.named_parameters()}
        buckets.append(bucket.index())
        for param in bucket.parameters():
            name = known[id(param)]
            assert recorder.accounts[name].seen()
            recorder.consume(name, param.grad.reshape(-1))
            at_bucket[name] = recorder.moment(name).clone()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    hook.__annotations__["return"] = torch.futures.Future[torch.Tensor]
    hook.__annotations__["bucket"] = dist.GradBucket
    model.register_comm_hook(None, hook)
    for step, to_none in enumerate((True, True, False, False)):
        at_bucket.clear()
        model.zero_grad(set_to_none=to_none)
        accumulate = step > 0  # torch refuses no_sync in the first step of a static graph
        if accumulate:
            with model.no_sync():
                model(x[:3]).square().sum().backward()
        model(x).square().sum().backward()
        assert_equal(at_bucket, {name: truth[5][name] + accumulate * truth[3][name] for name in truth[5]})
        assert not any(recorder.accounts[name].seen() for name in recorder.accounts)
    assert len(set(buckets)) > 5
    recorder.remove()


def test_names_are_those_of_the_users_model() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    model = DistributedDataParallel(net)
    recorder = Recorder(model, dict(net.named_parameters()), batch_dim={"0": 0})
    assert [row.name for row in recorder.coverage()] == ["0.weight", "0.bias"]
    recorder.remove()
