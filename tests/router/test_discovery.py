"""Names and what they stand for: a resolver that says what the test says."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from epd.router.discovery import Discovery, Stage, address_of, is_name, resolve_name


class Names:
    """A DNS that is set by hand. A name that is absent fails, as the system's resolver does."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.names = {name: list(ips) for name, ips in names.items()}
        self.asked = 0
        self._was_asked = asyncio.Condition()

    async def resolve(self, host: str) -> Sequence[str]:
        async with self._was_asked:
            self.asked += 1
            self._was_asked.notify_all()
        if host not in self.names:
            raise OSError(-2, "Name or service not known")
        return self.names[host]

    async def settle(self) -> None:
        """Until every name was looked up again."""
        enough = self.asked + 4
        async with self._was_asked:
            await self._was_asked.wait_for(lambda: self.asked >= enough)


class Members:
    def __init__(self) -> None:
        self.present: list[str] = []
        self.events: list[str] = []

    def add(self, address: str) -> None:
        assert address not in self.present
        self.present.append(address)
        self.events.append(f"+{address}")

    def retire(self, address: str) -> None:
        self.present.remove(address)
        self.events.append(f"-{address}")

    def stage(self, *targets: str, name: str = "decode") -> Stage:
        return Stage(name=name, targets=targets, add=self.add, retire=self.retire)


def discovery(names: Names, *stages: Stage) -> Discovery:
    return Discovery(stages, period_s=0.001, resolve=names.resolve)


async def test_a_name_stands_for_all_its_addresses_and_follows_them() -> None:
    names, members = Names(decode=["10.0.0.2", "10.0.0.1"]), Members()
    async with discovery(names, members.stage("tcp://decode:7002")).running():
        assert members.present == ["tcp://10.0.0.1:7002", "tcp://10.0.0.2:7002"]
        names.names["decode"] = ["10.0.0.2", "10.0.0.3"]
        await names.settle()
        assert sorted(members.present) == ["tcp://10.0.0.2:7002", "tcp://10.0.0.3:7002"]
        # The old one is let go before the new one is known, and nobody is told twice.
        assert members.events[2:] == ["-tcp://10.0.0.1:7002", "+tcp://10.0.0.3:7002"]


async def test_unresolved_at_the_start_is_found_later(caplog: pytest.LogCaptureFixture) -> None:
    names, members = Names(), Members()
    seeking = discovery(names, members.stage("tcp://decode:7002"))
    async with seeking.running(first_s=0.01):
        assert members.present == []
        assert seeking.why_unknown("decode") == ["tcp://decode:7002: [Errno -2] Name or service not known"]
        await names.settle()
        assert caplog.text.count("cannot be resolved") == 1
        names.names["decode"] = ["10.0.0.1"]
        await names.settle()
        assert members.present == ["tcp://10.0.0.1:7002"]
        assert seeking.why_unknown("decode") == []


async def test_while_dns_fails_what_is_known_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    names, members = Names(decode=["10.0.0.1"]), Members()
    async with discovery(names, members.stage("tcp://decode:7002")).running():
        del names.names["decode"]
        await names.settle()
        assert members.present == ["tcp://10.0.0.1:7002"]
        assert "the addresses known stay in use" in caplog.text
        names.names["decode"] = []
        await names.settle()
        assert members.present == []


async def test_two_names_for_one_process_are_one_member() -> None:
    names, members = Names(a=["10.0.0.1"], b=["10.0.0.1", "10.0.0.2"]), Members()
    async with discovery(names, members.stage("tcp://a:1", "tcp://b:1")).running():
        assert sorted(members.present) == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]
        names.names["b"] = ["10.0.0.2"]
        await names.settle()
        assert sorted(members.present) == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]
        names.names["a"] = ["10.0.0.2"]
        await names.settle()
        assert members.present == ["tcp://10.0.0.2:1"]


async def test_a_name_that_never_answers_holds_nobody_up() -> None:
    members, others = Members(), Members()

    async def resolve(host: str) -> Sequence[str]:
        if host == "slow":
            await asyncio.sleep(3600)
        return ["10.0.0.1"]

    stages = [members.stage("tcp://slow:1"), others.stage("tcp://quick:2", name="prefill")]
    async with Discovery(stages, period_s=0.001, resolve=resolve).running(first_s=0.05):
        assert members.present == []
        assert others.present == ["tcp://10.0.0.1:2"]


async def test_addresses_that_are_no_names_are_added_once() -> None:
    names, members = Names(), Members()
    targets = ("ipc:///run/x", "tcp://10.0.0.1:7001", "tcp://[::1]:7001")
    async with discovery(names, members.stage(*targets)).running():
        assert sorted(members.present) == sorted(targets)
        await asyncio.sleep(0.01)
    assert names.asked == 0


async def test_without_any_name_the_block_begins_at_once() -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with Discovery([], period_s=1.0).running():
        assert loop.time() - started_s < 1.0


async def test_the_systems_resolver() -> None:
    assert await resolve_name("localhost") == ["127.0.0.1"]
    with pytest.raises(OSError, match=r"."):
        await resolve_name("nowhere.invalid")


def test_what_is_a_name() -> None:
    assert is_name("tcp://prefill:1")
    assert is_name("tcp://1.2.3.4.example:1")
    assert not any(map(is_name, ("tcp://1.2.3.4:1", "tcp://[::1]:1", "ipc:///x", "inproc://x")))
    parts: list[Callable[[], str]] = [lambda: address_of("::1", "7"), lambda: address_of("1.2.3.4", "7")]
    assert [part() for part in parts] == ["tcp://[::1]:7", "tcp://1.2.3.4:7"]
