"""What may be written as a rate, and what is refused before anything starts."""

from __future__ import annotations

import pytest

from gradwire.tools.input_errors import InputError
from gradwire.tools.lab import Lab, namespaces
from gradwire.tools.lab.rates import Link, parse_link, parse_links, parse_rate, token_bucket

UP_TO_64_KB = 65_536


@pytest.mark.parametrize(
    ("rate", "mbit"),
    [
        ("10Mbit", 10),
        ("10 mbit", 10),
        ("1Gbit", 1000),
        ("2.5gbit", 2500),
        ("1500kbit", 1.5),
        ("100", 100),
        (100, 100),
        (1, 1),
        (2.5, 2.5),
        ("1e3", 1000),
        ("unlimited", None),
        (" Unlimited ", None),
    ],
)
def test_rates_that_may_be_written(rate, mbit):
    assert parse_rate(rate) == mbit


BAD = ["0", 0, -5, "-5Mbit", "0.5", "999kbit", 0.999, "100001Mbit", 1e6, float("nan"), float("inf"), True, "", "fast"]
BAD += ["10MB", "10mbps", "10 m", "1,0", "unlimited2", "10/", "10/0", "/10", "10/10/10", None]


@pytest.mark.parametrize("rate", BAD)
def test_impossible_rates_are_refused_before_anything_starts(rate, monkeypatch):
    monkeypatch.setattr("gradwire.tools.lab.namespaces.call", lambda *words: pytest.fail(f"ran {words}"))
    with pytest.raises(InputError, match=r"rate|hosts"):
        Lab(hosts=3, rate=rate)
    with pytest.raises(InputError, match=r"rate|hosts"):
        Lab(hosts=3, rate=[10, rate, 10])


def test_one_rate_for_all_or_one_for_each():
    ten, both = Link(10, 10), Link(100, 20)
    assert parse_links("10", 3) == parse_links(10, 3) == parse_links([10], 3) == [ten] * 3
    assert parse_links("10,100/20", 2) == parse_links([10, "100/20"], 2) == [ten, both]
    assert parse_link("unlimited/1Gbit") == Link(None, 1000)
    with pytest.raises(InputError, match="2 rates for 3 hosts"):
        parse_links("10,10", 3)
    with pytest.raises(InputError, match="0 rates for 3 hosts"):
        parse_links([], 3)


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_impossible_numbers_of_hosts_are_refused(hosts):
    with pytest.raises(InputError, match="hosts"):
        Lab(hosts=hosts, rate=10)


def test_links_in_words():
    assert str(Link(10, 10)) == "10 Mbit/s"
    assert str(Link(2.5, None)) == "2.5 Mbit/s up, unlimited down"


@pytest.mark.parametrize("mbit", [1, 1.5, 10, 100, 1000, 100_000])
def test_the_bucket_holds_two_packets_or_a_millisecond_and_the_queue_holds_more(mbit):
    words = token_bucket(mbit)
    burst, queue = int(words[words.index("burst") + 1]), int(words[words.index("limit") + 1])
    assert words[words.index("rate") + 1] == f"{mbit * 1_000_000:.0f}bit"
    assert burst == max(3028, mbit * 125)
    assert queue >= 10 * burst
    if mbit >= 1000:
        assert burst > UP_TO_64_KB  # such packets need not be cut up where it would cost most


def test_what_is_missing_is_said_in_words(monkeypatch):
    monkeypatch.setattr(namespaces, "find", lambda name: None if name == "tc" else f"/sbin/{name}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert namespaces.missing() == "the command tc (package iproute2), root: try sudo"
    with pytest.raises(InputError, match=r"needs the command tc.*--loopback"):
        Lab(hosts=2)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "find", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(namespaces, "holds", lambda name: name != "CAP_SYS_ADMIN")
    assert namespaces.missing() == "CAP_SYS_ADMIN, which this container's root has not"
    monkeypatch.setattr("sys.platform", "darwin")
    assert namespaces.missing().startswith("Linux")


def test_what_a_command_says_is_in_the_error():
    if namespaces.find("ip") is None:
        pytest.skip("no command ip")
    with pytest.raises(namespaces.LabError, match=r"`ip link show nonsense0` failed: .*nonsense0"):
        namespaces.call("ip", "link", "show", "nonsense0")


def test_only_names_of_labs_whose_process_is_gone_are_left_over(monkeypatch):
    monkeypatch.setattr(namespaces, "runs", lambda pid: pid == 77)
    names = ["gradwire-66-0", "gradwire-66-0-bridge", "gradwire-77-0"]
    names += ["gradwire-66", "gradwire-x-0", "mine", "gradwire-66-0-other"]
    found = [name for name in names if namespaces.is_left_over(name)]
    assert found == ["gradwire-66-0", "gradwire-66-0-bridge"]
