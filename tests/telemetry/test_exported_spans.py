"""Spans of a whole deployment, every process of it, as a collector gets them over OTLP."""

from itertools import pairwise

import pytest

from tests.fakes.span_tree import Node, trees
from tests.telemetry.conftest import Recorded

pytestmark = pytest.mark.e2e

PROCESSES = {"gateway", "encoder-0", "prefill-0", "decode-0"}


def tree_of(recorded: Recorded, name: str) -> Node:
    (root,) = trees(recorded.of_request(name))
    return root


def test_all_four_processes_are_in_one_trace(recorded: Recorded) -> None:
    assert all(answer.status in (200, 400, 422) for answer in recorded.answers.values()), recorded.answers
    root = tree_of(recorded, "picture")
    assert {node.service for node in root.walk()} == PROCESSES
    where = {node.name: node.service for node in root.walk() if not node.name.startswith("mimo.gateway")}
    assert where == {
        "mimo.request": "gateway",
        "mimo.media.fetch": "gateway",
        "mimo.encode": "gateway",
        "mimo.encode.serve": "encoder-0",
        "mimo.encode.queue": "encoder-0",
        "mimo.encode.prepare": "encoder-0",
        "mimo.encode.tower": "encoder-0",
        "mimo.generate": "gateway",
        "mimo.prefill.queue": "prefill-0",
        "mimo.prefill": "prefill-0",
        "mimo.kv.transfer": "decode-0",
        "mimo.decode.queue": "decode-0",
        "mimo.decode": "decode-0",
    }


def test_times_agree_between_processes(recorded: Recorded) -> None:
    """All clocks are one here: nothing begins before what it waits for, but for the rounding of two clocks."""
    tick_ns = 2_000_000
    for name in ("picture", "video", "sound"):
        root = tree_of(recorded, name)
        for node in root.walk():
            assert root.start_ns - tick_ns <= node.start_ns <= node.stop_ns <= root.stop_ns + tick_ns, (name, node.name)
        steps = ("mimo.encode.tower", "mimo.prefill", "mimo.kv.transfer", "mimo.decode.queue", "mimo.decode")
        order = [root.one(step) for step in steps]
        for before, after in pairwise(order):
            assert before.stop_ns <= after.start_ns + tick_ns, (name, before.name, after.name)
        assert root.one("mimo.kv.transfer").attributes["mimo.kv.bytes"] > 0


def test_every_request_has_one_trace_with_one_root(recorded: Recorded) -> None:
    roots = trees(recorded.nodes)
    assert {root.name for root in roots} == {"mimo.request"}
    # One more than was answered: whose client left.
    assert len(roots) == len({root.trace_id for root in roots}) == len(recorded.answers) + 1
    (left,) = [root for root in roots if root.attributes.get("error.type") == "client_closed_request"]
    assert any(node.attributes.get("mimo.cancelled") for node in left.walk() if node is not left)


def test_other_routes_are_traced_as_well(recorded: Recorded) -> None:
    assert len(tree_of(recorded, "choices").find("mimo.generate")) == 2
    completion = tree_of(recorded, "completion")
    assert completion.attributes["gen_ai.operation.name"] == "text_completion"
    assert completion.find("mimo.decode")
    encode = tree_of(recorded, "encode")
    assert encode.attributes["http.route"] == "/v1/encode"
    assert {"mimo.media.fetch", "mimo.encode", "mimo.encode.tower"} <= {node.name for node in encode.walk()}
    refused = tree_of(recorded, "refused")
    assert refused.attributes["http.response.status_code"] == 400
    assert tree_of(recorded, "undecodable").one("mimo.encode.serve").is_error


def test_nothing_was_lost_or_complained_of(recorded: Recorded) -> None:
    assert "left no spans" not in recorded.log
    assert "opentelemetry" not in recorded.log
    assert recorded.log.count("traces are exported") == len(PROCESSES)
