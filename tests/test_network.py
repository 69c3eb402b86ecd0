"""Tokens of networks: what is written is what is made, and a mistake is refused in one message."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.network import CONDITIONS, MOST_HOSTS, Network, hosts_of

RATES = st.integers(4, 4000)
VALUES = {
    "rate": RATES.map(lambda rate: (f"{rate}mbit", rate * 1e6 / 8)),
    "oversubscribed": st.integers(2, 4).map(lambda factor: (str(factor), float(factor))),
    "slow-host": st.integers(25, 99).map(lambda share: (f"{share}%", share / 100)),
    "background": st.integers(1, 99).map(lambda share: (f"{share}%", share / 100)),
    "delay": st.integers(1, 5000).map(lambda us: (f"{us}us", us * 1e-6)),
    "loss": st.integers(1, 99).map(lambda share: (f"{share}%", share / 100)),
}
"""Of each condition: texts, and what they say."""


@given(
    hosts=st.integers(1, MOST_HOSTS // 2).map(lambda half: 2 * half),
    rate=RATES,
    conditions=st.lists(st.sampled_from(sorted(VALUES)), unique=True).flatmap(
        lambda names: st.tuples(*(st.tuples(st.just(name), VALUES[name]) for name in names))
    ),
)
def test_hosts_rate_and_conditions_are_those_of_the_token(
    hosts: int, rate: int, conditions: tuple[tuple[str, tuple[str, float]], ...]
) -> None:
    token = "+".join([f"shaped:{hosts}x{rate}mbit", *(f"{name}={text}" for name, (text, _) in conditions)])
    network, values = Network.parse(token), {name: value for name, (_, value) in conditions}
    assert (network.token, network.hosts) == (token, hosts) and network.shaped and not network.paced
    assert dict(network.conditions) == pytest.approx(values)
    assert network.plain == Network.parse(f"shaped:{hosts}x{rate}mbit") and network.plain.conditions == ()
    usual = values.get("rate", rate * 1e6 / 8)
    expected = [usual, usual * values.get("slow-host", 1.0), *[usual] * (hosts - 2)]
    assert network.rates_bytes_per_s() == pytest.approx(expected)
    factor = values.get("oversubscribed", 0.0)
    assert network.uplink_bytes_per_s == pytest.approx(hosts / 2 * usual / factor if factor else math.inf)


def test_every_condition_has_values_in_these_tests() -> None:
    assert set(VALUES) == set(CONDITIONS)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("shaped", "is not understood"),
        ("shaped:", "is not understood"),
        ("shaped:2", "is not understood"),
        ("shaped:x1gbit", "is not understood"),
        ("shaped:1x1gbit", "2 to 64 hosts"),
        ("shaped:65x1gbit", "2 to 64 hosts"),
        ("shaped:-2x1gbit", "is not understood"),
        ("shaped:02x1gbit", "is not understood"),
        ("shaped:²x1gbit", "is not understood"),
        ("shaped:2X1gbit", "is not understood"),
        ("shaped:2x1gbit +rate=1mbit", "is not understood"),
        ("shaped:2x", "bandwidth ''"),
        ("shaped:2x1gbi", "bandwidth '1gbi'"),
        ("shaped:2x-1gbit", "bandwidth '-1gbit'"),
        ("shaped:2xinfgbit", "bandwidth 'infgbit'"),
        ("shaped:2x0gbit", "more than 0"),
        ("shaped:2x999kbit", "1 mbit or more on every link"),
        ("shaped:2x10mbit+slow-host=1%", "1 mbit or more on every link"),
        ("shaped:2x10mbit+oversubscribed=11", "1 mbit or more on every link"),
        ("shaped:2x1gbit+rate=10kbit", "1 mbit or more on every link"),
        ("shaped:2x1gbit+", "rate, oversubscribed, slow-host"),
        ("shaped:2x1gbit+slowhost=50%", "did you mean 'slow-host'"),
        ("shaped:2x1gbit+slow-host", "slow-host without a value"),
        ("shaped:2x1gbit+slow-host=", "share ''"),
        ("shaped:2x1gbit+slow-host=0%", "more than 0% and less than 100%"),
        ("shaped:2x1gbit+slow-host=100%", "more than 0% and less than 100%"),
        ("shaped:2x1gbit+background=1.5", "more than 0% and less than 100%"),
        ("shaped:2x1gbit+loss=-1%", "share '-1%'"),
        ("shaped:2x1gbit+delay=1", "duration '1'"),
        ("shaped:2x1gbit+oversubscribed=1", "a number above 1"),
        ("shaped:2x1gbit+oversubscribed=nan", "a number above 1"),
        ("shaped:2x1gbit+oversubscribed=4:1", "a number above 1"),
        ("shaped:3x1gbit+oversubscribed=2", "an even number of hosts"),
        ("shaped:2x1gbit+rate=9mbit+rate=9mbit", "rate twice"),
        ("shapd:2x1gbit", "shaped:HOSTSxBANDWIDTH"),
        ("paced:2x1gbit", "paced:LATENCY,BANDWIDTH"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(token: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Network.parse(token)
    assert message in str(caught.value) and caught.value.allowed


@given(st.text(alphabet="0123456789xgmkbit+=-%:.,shapedrlown \n²", max_size=24))
def test_any_other_text_is_refused_or_is_links_that_can_be_made(text: str) -> None:
    try:
        network = Network.parse(f"shaped:{text}")
    except ConfigError:
        return
    rates = [*network.rates_bytes_per_s(), network.uplink_bytes_per_s]
    assert len(rates) == network.hosts + 1 and 2 <= network.hosts <= MOST_HOSTS
    assert min(rates) >= 125e3 and all(map(math.isfinite, rates[:-1]))


def test_one_job_s_networks_are_of_the_same_hosts() -> None:
    tokens = ["shaped:2x1gbit", "shaped:2x1gbit+slow-host=50%", "shaped:2x1gbit"]
    assert [network.token for network in hosts_of(tokens)] == tokens[:2]
    assert hosts_of(["node", "paced:1us,1gbit"]) == () == hosts_of([])
    for other in ("node", "paced:1us,1gbit", "shaped:4x1gbit"):
        with pytest.raises(ConfigError, match="in several runs"):
            hosts_of([other, *tokens])
