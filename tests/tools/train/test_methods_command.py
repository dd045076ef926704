"""`gradwire methods`: every method once, and bits that are those of real messages."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from commands import run_command

from gradwire import BF16, VGC, Dense
from gradwire.exchange.in_process import InProcess
from gradwire.methods import METHODS, Sum, from_spec
from gradwire.moments import Recorder
from gradwire.tools.input_errors import InputError
from gradwire.tools.train import digits, method_bits


@pytest.fixture(scope="module")
def trace() -> method_bits.GradientTrace:
    return method_bits.record()


def test_the_command_lists_what_it_is_asked_for():
    result = run_command("methods", "vgc:alpha=2", "bf16")
    assert result.returncode == 0, result.stderr
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    first = {row[0].strip(): row for row in rows if row[0].strip()}
    assert list(first) == ["vgc:alpha=2.0", "bf16"]
    assert first["vgc:alpha=2.0"][2].strip() == "arXiv:1802.06058"
    assert 0.1 < float(first["vgc:alpha=2.0"][3]) < 4
    assert float(first["bf16"][3]) == 16
    assert "feedback=false" in result.stdout
    assert not result.stderr, "no bar where there is no terminal"


def test_an_unknown_method_is_bad_input():
    result = run_command("methods", "vgcc")
    assert result.returncode == 2
    assert "unknown compressor 'vgcc'; known: dense" in result.stderr
    assert not result.stdout


def test_wrong_options_are_refused_before_anything_is_trained():
    with pytest.raises(InputError, match="alpha must be >= 0"):
        method_bits.choose(["dense", "vgc:alpha=-1"])


def test_all_methods_are_listed_when_none_is_named():
    assert [type(compressor) for compressor in method_bits.choose([])] == [known.method for known in METHODS.values()]


def test_the_trace_is_of_two_workers_and_its_moments_are_of_their_samples(trace):
    assert [len(grads) for grads in trace.grads] == [2] * (method_bits.SETTLED + method_bits.COUNTED)
    assert not torch.equal(*trace.grads[-1])
    for grads, moments in zip(trace.grads, trace.moments, strict=True):
        for grad, moment in zip(grads, moments, strict=True):
            # Cauchy-Schwarz over the 16 samples whose sum is the gradient
            assert bool((grad.square() <= 16 * moment * (1 + 1e-4) + 1e-12).all())


def test_one_gradient_and_its_moment_by_the_definition():
    """Sample by sample, with autograd alone."""
    task = digits.open_digits(None)
    model, indices = task.make_model(), torch.arange(16)
    recorder = Recorder(model, dict(model.named_parameters()), strict=True)
    grad, moment = method_bits._look(task, model, recorder, indices)
    recorder.remove()
    wanted, squares = torch.zeros_like(grad), torch.zeros_like(moment)
    for index in indices:
        inputs, targets = task.batch(index[None])
        parts = torch.autograd.grad(task.loss(model(inputs), targets) / 16, list(model.parameters()))
        sample = torch.cat([part.flatten() for part in parts])
        wanted += sample
        squares += sample.square()
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(moment, squares, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(("compressor", "bits"), [(Dense(), 32.0), (BF16(), 16.0)])
def test_a_cast_takes_the_bits_of_its_type(trace, compressor, bits):
    assert method_bits.measure(compressor, trace).bits == bits


def test_a_method_that_needs_room_begins_dense_and_settles(trace):
    ranks = InProcess(VGC(alpha=1.5), trace.layout, 2, planned=True)
    every = zip(trace.grads, trace.moments, strict=True)
    n_bytes = [ranks(grads, moments).n_bytes for grads, moments in every]
    assert n_bytes[0] > 4 * trace.layout.numel
    assert all(later < n_bytes[0] / 2 for later in n_bytes[1:])
    counted = n_bytes[-method_bits.COUNTED :]
    wanted = 8 * sum(counted) / len(counted) / trace.layout.numel
    assert method_bits.measure(VGC(alpha=1.5), trace).bits == pytest.approx(wanted)


@pytest.mark.parametrize("compressor", method_bits.choose([]), ids=METHODS)
def test_every_method_can_be_measured(trace, compressor):
    entry = method_bits.measure(compressor, trace)
    assert from_spec(entry.spec) == compressor
    assert len(entry.about) > 20
    assert 0 < entry.bits <= 32.5
    assert entry.paper.startswith("arXiv:") or isinstance(compressor, Sum)
    assert all(f"{option.name}=" in entry.options for option in fields(compressor))
