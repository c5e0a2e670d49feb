"""Every metric is named, typed and explained as Prometheus wants it, and there are not too many of any."""

import re
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.service import ROOT
from tests.telemetry.conftest import NUM_GENERATED, Recorded
from tests.telemetry.metrics_table import rows, table

DOC = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
UNITS = {
    *("seconds", "bytes", "tokens", "pages", "requests", "ratio", "jobs", "media", "sequences", "messages", "files"),
    *(
        "steps",
        "hits",
        "misses",
        "loads",
        "heals",
        "retractions",
        "transfers",
        "batches",
        "passes",
        "threads",
        "leases",
    ),
    *("entries", "records", "reads", "errors", "copies", "gets", "puts", "prefetches", "touches", "timeouts"),
    *("failures", "disconnects", "retries", "parts", "starts", "ends", "names", "lookups", "evictions"),
}
# States of things, which have no unit.
STATES = {"ready", "wedged", "refused", "breaker", "info", "corrupt", "sglang"}
_ID = re.compile(r"[0-9a-f]{12,}|chatcmpl|req-")


def test_names_have_a_stage_a_unit_and_a_text() -> None:
    found = rows()
    assert len(found) > 100
    for row in found:
        assert re.fullmatch(r"mimo_(gateway|encoder|worker)_[a-z][a-z0-9_]*", row.name), row
        assert (row.kind == "counter") == row.name.endswith("_total"), row
        assert not row.name.endswith(("_count", "_sum", "_bucket", "_created")), row
        assert row.name.removesuffix("_total").rpartition("_")[2] in UNITS | STATES, row
        assert len(row.text) > 12, row
        assert row.text[0].isupper() or row.text[0].isdigit(), row
        assert not row.text.endswith("."), row
        assert row.kind in ("counter", "gauge", "histogram"), row
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in row.labels), row
        assert "le" not in row.labels
        assert "quantile" not in row.labels
    # One name, one meaning: what differs only in its case or a plural would be confused.
    assert len({row.name.rstrip("s") for row in found}) == len(found)


def test_the_table_in_the_docs_is_this_one() -> None:
    begin, end = "<!-- metrics: begin -->\n", "\n<!-- metrics: end -->"
    shown = DOC[DOC.index(begin) + len(begin) : DOC.index(end)].strip()
    assert shown == table(), "print it with: python -m tests.telemetry.metrics_table"


@pytest.mark.e2e
def test_a_real_deployment_shows_only_what_is_in_the_table(recorded: Recorded) -> None:
    known = {row.name: row for row in rows()}
    for family in text_string_to_metric_families(recorded.metrics):
        if not family.name.startswith("mimo_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        row = known[re.sub(r"^mimo_(prefill|decode)_", "mimo_worker_", name)]
        assert (family.type, family.documentation) == (row.kind, row.text)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels <= set(row.labels), family.name


@pytest.mark.e2e
def test_labels_do_not_grow_with_the_traffic(recorded: Recorded) -> None:
    series: Counter[str] = Counter()
    seen: set[str] = set()
    for line in recorded.metrics.splitlines():
        if line.startswith("#"):
            continue
        key = line.rpartition(" ")[0]
        assert key not in seen, f"twice: {key}"
        seen.add(key)
        series[key.partition("{")[0]] += 1
        labels = re.sub(r'(arena|address)="[^"]*"', "", key)
        assert not _ID.search(labels), f"an id is no label: {key}"
    assert max(series.values()) <= 60, series.most_common(3)
    assert len(seen) < 1500


@pytest.mark.e2e
def test_what_was_asked_is_what_is_counted(recorded: Recorded) -> None:
    lines = [line for line in recorded.metrics.splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def total(name: str, *labels: str) -> float:
        return sum(
            value
            for key, value in values.items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )

    answers = list(recorded.answers.values())
    usages = [answer.body["usage"] for answer in answers if answer.status == 200 and "usage" in answer.body]
    route = 'route="/v1/chat/completions"'
    assert total("mimo_gateway_requests_total", route, 'status="200"') == 5
    assert total("mimo_gateway_requests_total", route, 'status="400"') >= 1
    assert total("mimo_gateway_requests_total", route, 'status="499"') + total("mimo_gateway_disconnects_total") >= 1
    assert total("mimo_gateway_tokens_total", 'kind="completion"') == sum(u["completion_tokens"] for u in usages)
    assert total("mimo_gateway_tokens_total", 'kind="prompt"') == sum(u["prompt_tokens"] for u in usages)
    assert total("mimo_gateway_ttft_seconds_count") == len(usages) + 1
    assert total("mimo_gateway_inter_token_seconds_count") > 0
    assert total("mimo_encoder_tokens_total", 'modality="image"') > 0
    assert total("mimo_encoder_tokens_total", 'modality="audio"') > 0
    for stage in ("prefill", "decode"):
        assert total(f"mimo_{stage}_step_seconds_count") == total(f"mimo_{stage}_steps_total")
        assert total(f"mimo_{stage}_queue_seconds_count") == NUM_GENERATED
    assert total("mimo_prefill_prompt_seconds_count") == NUM_GENERATED
    assert total("mimo_decode_transfer_seconds_count") == NUM_GENERATED
    assert total("mimo_decode_answer_seconds_count") == NUM_GENERATED
    # What a stage does not do it does not measure.
    for elsewhere in ("prefill_answer_seconds", "prefill_transfer_seconds", "decode_prompt_seconds"):
        assert total(f"mimo_{elsewhere}_count") == 0
    assert total("mimo_prefill_expert_imbalance_ratio", "mean") >= 1
