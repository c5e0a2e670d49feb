"""A collector that is away: what is logged of it, and that it keeps no process from ending."""

import logging
import socket
import time

import pytest

from encoder.seldom import Seldom
from encoder.tracing import Carrier, exporting, open_span
from encoder.tracing_setup import make_provider

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def close_s(environment: dict[str, str], patch: pytest.MonkeyPatch, *, wait_s: float = 0.0) -> float:
    """How long the end takes of a process with a few spans to send, this long after they were made."""
    for name, value in environment.items():
        patch.setenv(name, value)
    with exporting("gateway", "gateway", environment=environment):
        for _ in range(3):
            open_span("x", parent=Carrier()).end()
        time.sleep(wait_s)
        before_s = time.monotonic()
    return time.monotonic() - before_s


@pytest.mark.parametrize("wait_s", [0.0, 0.6])
def test_one_that_refuses_is_given_up_at_once_and_told_in_one_line(
    wait_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether its first try is the last one, or waits for another when the process ends."""
    caplog.set_level(logging.WARNING)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    assert close_s(environment, monkeypatch, wait_s=wait_s) < 0.8
    assert [record.getMessage() for record in caplog.records] == ["spans cannot be sent: Connection refused"]


def test_one_that_does_not_answer_is_waited_for_no_longer_than_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("encoder.tracing._FLUSH_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert 0.4 < close_s({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, monkeypatch) < 1.5
    assert "could not be sent within 0.5 s" in caplog.text


def test_loggers_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    before = list(noisy.filters)
    provider = make_provider("gateway", "gateway", {})
    (added,) = [one for one in noisy.filters if one not in before]
    provider.shutdown()
    assert added not in noisy.filters


def test_a_line_a_period_that_counts_the_others() -> None:
    now_s = 0.0
    seldom = Seldom(60.0, lambda: now_s)
    assert seldom.due() == ""
    assert [seldom.due() for _ in range(3)] == [None] * 3
    now_s = 60.0
    assert seldom.due() == " (and 3 more since the last such line)"
    now_s = 200.0
    assert seldom.due() == ""
