"""What may race: methods, rates and numbers that are refused before anything starts, and the runs of a race."""

from __future__ import annotations

import pytest

from gradwire.tools.input_errors import InputError
from gradwire.tools.race import contest, race_methods
from gradwire.tools.race.contest import RaceRun

COMMON = {"task": "digits", "hosts": 4, "target": 0.97}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("dense,bf16", ["dense", "bf16"]),
        ("vgc:alpha=1.5,zeta=0.99,dense", ["vgc:alpha=1.5,zeta=0.99", "dense"]),
        (
            " torch:powersgd:rank=4,start=10 , topk:density=0.01@2,",
            ["torch:powersgd:rank=4,start=10", "topk:density=0.01@2"],
        ),
        ("python:os.path.join,vgc@0.5", ["python:os.path.join", "vgc@0.5"]),
        ("vgc:alpha=0,density=0.03,every=30@2,diloco", ["vgc:alpha=0,density=0.03,every=30@2", "diloco"]),
        ("", []),
    ],
)
def test_methods_and_their_options_are_told_apart(text, names):
    assert race_methods.split(text) == names


@pytest.mark.parametrize(
    "text", ["dense", "vgc:alpha=1.5,zeta=0.99", "torch:allreduce", "torch:fp16", "auto", "python:os.path.join"]
)
def test_methods_that_there_are(text):
    method = race_methods.parse(text)
    assert (method.name, method.factor, method.buckets) == (text, 1.0, {})


def test_a_method_says_what_momentum_it_has():
    assert [race_methods.parse(text).momentum for text in ("topk:momentum=0.9@2", "topk", "auto", "torch:fp16")] == [
        0.9,
        0,
        0,
        0,
    ]


def test_powersgd_of_torch_has_one_bucket_and_a_factor_is_no_part_of_the_method():
    method = race_methods.parse("torch:powersgd:rank=4@0.5")
    assert method.buckets == {"bucket_cap_mb": 1024}
    assert method.factor == 0.5


def test_recipes_and_what_takes_an_optimizer_have_local_steps():
    method = race_methods.parse("vgc:alpha=0,density=0.03,every=30@2")
    assert method.begin is None
    assert method.alone is not None
    assert (method.factor, method.momentum) == (2, 0)
    assert race_methods.parse("topk:momentum=0.9,every=3").momentum == 0  # the inner optimizer keeps its own
    for text in ("diloco", "torch:postlocalsgd:every=30", "python:benchmarks.torchft_peer.diloco"):
        assert race_methods.parse(text).alone is not None
    for text in ("vgc", "torch:bf16", "python:os.path.join"):
        assert race_methods.parse(text).alone is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vgc:every=30", "local steps .* no second moments"),
        ("diloco:every=0", "every must be a whole number of at least 1"),
        ("diloco:density=1", "diloco has no option 'density=1'; known: every, [a-z_, ]*$"),
        ("torch:postlocalsgd:rank=1", "takes whole numbers from 1 for every, start"),
        (
            "zip",
            r"method 'zip': unknown compressor 'zip'; .*diloco, .*torch:allreduce.*python:module.function",
        ),
        ("vgc:beta=1", r"unknown option 'beta=1' of vgc \(write option=value\); known: alpha, [a-z_, ]*$"),
        ("vgc:alpha=-1", "alpha must be >= 0"),
        ("torch:topk", "'torch:topk' does not exist. torch's: torch:allreduce, torch:fp16, torch:bf16, torch:powersgd"),
        (
            "torch:powersgd:rank=0",
            "'rank=0' is not possible; torch:powersgd takes whole numbers from 1 for rank, start",
        ),
        ("torch:powersgd:rank", "'rank' is not possible"),
        ("torch:powersgd:size=1", "'size=1' is not possible"),
        ("torch:fp16:bits=8", "torch:fp16 takes no options"),
        ("python:nowhere.hook", "python:module.function.*nowhere"),
        ("python:os.nothing", "python:module.function.*nothing"),
        ("python:hook", "python:module.function"),
        ("python:os.name", "os.name is no function"),
        ("vgc@", "after @ comes a factor"),
        ("vgc@-1", "after @ comes a factor"),
        ("vgc@nan", "after @ comes a factor"),
    ],
)
def test_methods_that_there_are_not(text, message):
    with pytest.raises(InputError, match=message):
        race_methods.parse(text)


def test_every_rate_seed_and_method_is_a_run():
    runs = contest.runs("10, 1Gbit", "dense,vgc", [0, 1, 0], **COMMON)
    assert [(run.rate, run.seed, run.method) for run in runs] == [
        (rate, seed, name) for rate in ("10", "1Gbit") for seed in (0, 1) for name in ("dense", "vgc")
    ]
    assert [run.rate for run in contest.runs("10,100", "dense", [0], True, **COMMON)] == ["unshaped"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rates": "10,0"}, "a rate of 0 is not possible"),
        ({"rates": "fast"}, "'fast' is not a rate"),
        ({"rates": ","}, "at least one rate"),
        ({"names": ""}, "at least one rate and one method"),
        ({"names": "dense,zip"}, "unknown compressor 'zip'"),
        ({"task": "mnist"}, "unknown task 'mnist'"),
        ({"task": "text"}, "needs --data FILE"),
        ({"task": "text", "target": 8.0}, "--target 8.0: bits per byte between 0 and 8"),
        ({"task": "text", "target": 0.0}, "--target 0.0: bits per byte"),
        ({"task": "cifar10"}, "needs --data"),
        ({"hosts": 1}, "--hosts 1: from 2"),
        ({"hosts": 251}, "--hosts 251"),
        ({"target": 97.0}, "--target 97.0: an accuracy between 0 and 1"),
        ({"target": 0.0}, "--target 0.0"),
        ({"every": 0}, "--every must be 1 or more"),
        ({"limit_steps": 0}, "--limit-steps must be 1 or more"),
        ({"limit_s": float("nan")}, "--limit-s must be a positive"),
        ({"seeds": [-1]}, "--seed must be 0 or more"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
        ({"learning_rate": -1.0}, "--learning-rate must be a positive number"),
        ({"batch": 0}, "--batch must be 1 or more"),
    ],
)
def test_what_cannot_race(given, message):
    settings = {"rates": "10", "names": "dense", "seeds": [0], **COMMON, **given}
    with pytest.raises(InputError, match=message):
        contest.runs(settings.pop("rates"), settings.pop("names"), settings.pop("seeds"), **settings)


def test_two_runs_are_the_same_whatever_their_limits():
    run = RaceRun("digits", 4, "10", "vgc", 0, 0.97)
    assert run.key() == RaceRun("digits", 4, "10", "vgc", 0, 0.97, limit_s=1, limit_steps=7, data="x").key()
    others = [{"rate": "100"}, {"seed": 1}, {"target": 0.9}, {"every": 1}, {"batch": 8}, {"learning_rate": 0.01}]
    fields = {"task": "digits", "hosts": 4, "rate": "10", "method": "vgc", "seed": 0, "target": 0.97}
    assert all(RaceRun(**{**fields, **other}).key() != run.key() for other in others)
