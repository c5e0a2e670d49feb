"""Address rules: what counts as public, and that numeric disguises are refused."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from preprocess import MediaForbidden
from preprocess.addresses import CheckedResolver, SystemLookup, check_endpoint, is_public

REFUSED = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1", "::127.0.0.1",
    "::ffff:0:127.0.0.1", "64:ff9b:1::a00:1", "64:ff9b::a9fe:a9fe", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "fec0::1", "3fff::1", "100::1", "5f00::1", "192.0.0.8", "192.88.99.1", "198.51.100.1", "203.0.113.7",
    "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "::ffff:168.63.129.16",
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


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.170.2", "fe80::1", "224.0.0.1", "0.0.0.0", "::ffff:169.254.169.254"),
        *("168.63.129.16", "100.100.100.200", "::ffff:100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"),
    ],
)
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


@pytest.mark.parametrize("host", ["fe80::1%eth0", "fe80::1%25eth0", "::1%lo", "::1%25lo"])
def test_zones_do_not_hide_an_address(host: str) -> None:
    with pytest.raises(MediaForbidden):
        check_endpoint(host, 80)


async def test_a_zone_in_an_answer_is_judged_and_kept() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["fe80::1%eth0"]

    with pytest.raises(MediaForbidden):
        await CheckedResolver(lookup, allow_private_addresses=True).resolve("near.example", 80)


async def test_overlapping_lookups_of_one_name_are_one() -> None:
    asked: list[tuple[str, int]] = []
    answer = asyncio.Event()

    async def lookup(host: str, port: int) -> list[str]:
        asked.append((host, port))
        await answer.wait()
        if host == "lost.example":
            raise OSError("no such name")
        return ["8.8.8.8"]

    resolver = CheckedResolver(lookup, allow_private_addresses=False)
    names = [("a.example", 80), ("a.example", 80), ("a.example", 443), ("lost.example", 80), ("lost.example", 80)]
    waiting = [asyncio.create_task(resolver.resolve(*name)) for name in names]
    await asyncio.sleep(0)
    waiting[0].cancel()
    answer.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in found] == [asyncio.CancelledError, list, list, OSError, OSError]
    assert asked == [("a.example", 80), ("a.example", 443), ("lost.example", 80)]
    await resolver.resolve("a.example", 80)
    assert len(asked) == 4, "an answer is not kept"
    await resolver.close()


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example", "."])
async def test_what_cannot_be_a_name_does_not_resolve(host: str) -> None:
    lookup = SystemLookup()
    with pytest.raises(OSError, match="cannot be a name"):
        await lookup(host, 80)
    lookup.close()


async def test_the_system_knows_localhost() -> None:
    lookup = SystemLookup()
    assert set(await lookup("localhost", 80)) <= {"127.0.0.1", "::1"}
    lookup.close()
