"""Address rules: what counts as public, and that numeric disguises are refused."""

from __future__ import annotations

import ipaddress

import pytest

from preprocess import MediaForbidden
from preprocess.addresses import CheckedResolver, check_endpoint, is_public

REFUSED = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
]  # fmt: skip
ALLOWED = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", REFUSED)
def test_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    with pytest.raises(MediaForbidden, match="not public"):
        check_endpoint(address, 80)


@pytest.mark.parametrize("address", ALLOWED)
def test_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
    check_endpoint(address, 443)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.1.2.3", "192.168.0.9", "::1", "fd12::1", "::ffff:10.0.0.1"])
def test_private_networks_can_be_opened(address: str) -> None:
    check_endpoint(address, 8080, allow_private=True)


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "224.0.0.1", "0.0.0.0", "::ffff:169.254.169.254"])
async def test_nothing_opens_link_local_and_multicast(address: str) -> None:
    with pytest.raises(MediaForbidden, match="neither public nor"):
        check_endpoint(address, 80, allow_private=True)

    async def lookup(host: str, port: int) -> list[str]:
        return [address]

    with pytest.raises(MediaForbidden):
        await CheckedResolver(lookup, allow_private_addresses=True).resolve("metadata.example", 80)


@pytest.mark.parametrize(
    "host", ["2130706433", "127.1", "0x7f.1", "0x7f000001", "0177.0.0.1", "127.0.0.1.", "1.2.3.4.5"]
)
def test_numeric_disguises(host: str) -> None:
    with pytest.raises(MediaForbidden):
        check_endpoint(host, 80)


@pytest.mark.parametrize("port", [22, 25, 445, 1])
def test_ports(port: int) -> None:
    with pytest.raises(MediaForbidden, match="port"):
        check_endpoint("example.com", port)
    check_endpoint("example.com", 8080)


async def test_one_private_answer_refuses_the_name() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["8.8.8.8", "10.0.0.1"]

    with pytest.raises(MediaForbidden, match=r"mixed\.example"):
        await CheckedResolver(lookup, allow_private_addresses=False).resolve("mixed.example", 80)
    answers = await CheckedResolver(lookup, allow_private_addresses=True).resolve("mixed.example", 80)
    assert [answer["host"] for answer in answers] == ["8.8.8.8", "10.0.0.1"]
