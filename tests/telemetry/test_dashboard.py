"""The dashboard and the alerts read what /metrics really has, by name and by label."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.service import ROOT
from tests.fakes.promql import NotPromql, Query, read_query
from tests.telemetry.conftest import Recorded

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "mimo-epd.json").read_text())
PROMETHEUS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
# What Prometheus adds to everything it scrapes, and the metric it makes itself.
SCRAPED = {"job", "instance"}


def queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*")
    for rule in ALERTS["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


def samples(text: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {"up": [{}]}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def fits(matcher: tuple[str, str, str], labels: dict[str, str]) -> bool:
    label, operator, value = matcher
    if label in SCRAPED:
        return True
    is_equal = re.fullmatch(value if "~" in operator else re.escape(value), labels.get(label, "")) is not None
    return is_equal is not operator.startswith("!")


def faults_of(query: Query, metrics: dict[str, list[dict[str, str]]]) -> list[str]:
    faults, labels = [], set(SCRAPED)
    for selector in query.selectors:
        read = [found for name, found in metrics.items() if re.fullmatch(selector.name, name)]
        series = [labels for found in read for labels in found]
        labels |= {label for one in series for label in one}
        for matcher in selector.matchers:
            if matcher[0] not in SCRAPED and not any(matcher[0] in one for one in series):
                faults.append(f"{selector.name} has no label {matcher[0]}")
        if not series:
            faults.append(f"there is no metric {selector.name}")
        # An error that has not happened has no series.
        elif not any(all(fits(matcher, one) for matcher in selector.matchers) for one in series) and not any(
            label in ("status", "route") for label, _, _ in selector.matchers
        ):
            faults.append(f"{selector.name} has nothing with {selector.matchers}")
    faults += [f"nothing has the label {label}" for label in query.grouped_by - labels]
    return faults


@pytest.mark.e2e
def test_every_query_reads_what_is_there(recorded: Recorded) -> None:
    metrics = samples(recorded.metrics)
    faults = [f"{title}: {fault}" for title, text in queries() for fault in faults_of(read_query(text), metrics)]
    assert not faults, "\n".join(faults)
    assert len(list(queries())) > 100


def test_the_checker_sees_what_is_wrong() -> None:
    metrics = {"a_total": [{"x": "1"}], "b_bucket": [{"le": "1", "y": "2"}]}

    def faults(text: str) -> list[str]:
        return faults_of(read_query(text), metrics)

    assert faults('sum by (x) (rate(a_total{x="1"}[5m])) / clamp_min(sum(rate(a_total[5m])), 1e-9)') == []
    assert faults('histogram_quantile(0.9, sum by (le) (rate({__name__=~"b_.*", y=~"[0-9]"}[5m])))') == []
    assert faults("a_total > 5 or up == 0") == ["there is no metric up"]
    assert faults("sum(rate(c_total[5m]))") == ["there is no metric c_total"]
    assert faults('a_total{z="1"}') == ["a_total has no label z", "a_total has nothing with (('z', '=', '1'),)"]
    assert faults('a_total{x="2"}') == ["a_total has nothing with (('x', '=', '2'),)"]
    assert faults("sum by (w) (a_total)") == ["nothing has the label w"]
    for wrong in ("sum(rate(a_total[5m])", "summ(a_total)", "sum(a_total))", "{x=1}", '{x="1"}', "a_total ; 1", "5"):
        with pytest.raises(NotPromql):
            read_query(wrong)


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, panel["title"]
        assert place["h"] > 0
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (one["title"], other["title"])


def test_the_dashboard_can_be_imported_anywhere() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert DASHBOARD["uid"] == "mimo-epd"
    assert "id" not in DASHBOARD, "an id belongs to one Grafana"
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["targets"], panel["title"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
            assert panel["title"]


def test_alerts_say_what_is_wrong_and_who_should_care() -> None:
    rules = ALERTS["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    (job,) = PROMETHEUS["scrape_configs"]
    assert job["job_name"] == "mimo"
