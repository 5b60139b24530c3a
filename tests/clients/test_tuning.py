"""Goal: what operators are given fits the server: alerts and dashboard name metrics that exist, each alert has a section
that says what to do, the unit and the kernel settings can be read by those who will.
Method: the files are parsed, names are compared with the table of metrics, promtool checks the rules."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TUNING = ROOT / "tuning"
ALERTS = TUNING / "alerts.yml"
WORD = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")


def metrics() -> set[str]:
    """Every series that the server has, under its default prefix."""
    names = set()
    for line in (ROOT / "src" / "metrics" / "names.txt").read_text().splitlines():
        name, kind = re.fullmatch(r"(\S+)\{[^}]*\} (\w+)", line).groups()
        name = name.replace("*_", "bazel_remote_")
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "Histogram" else {name}
    return names


def unknown(expression: str) -> set[str]:
    """Names in a query that are no metric. Labels in braces and in by (...) and on (...) do not count."""
    bare = re.sub(r'\{[^}]*\}|\b(?:by|on|without) \([^)]*\)|"[^"]*"|label_values|\$\w+', " ", expression)
    functions = {"histogram_quantile", "min_over_time", "max_over_time", "label_values", "__rate_interval"}
    return set(WORD.findall(bare)) - metrics() - functions


def alerts() -> dict[str, str]:
    """The expression of each alert."""
    found = re.findall(r"- alert: (\w+)\n\s+expr: >-\n((?:\s{10}.*\n)+)", ALERTS.read_text())
    return dict(found)


def test_names_that_do_not_exist_are_found():
    assert unknown("rate(bazel_remote_no_such_total[5m])") == {"bazel_remote_no_such_total"}
    assert unknown('sum by (grpc_method) (rate(grpc_server_handled_total{grpc_code="OK"}[5m]))') == set()


def test_alerts_name_metrics():
    assert len(alerts()) == ALERTS.read_text().count("- alert:") > 10
    for name, expression in alerts().items():
        assert not unknown(expression), name


def test_the_dashboard_names_metrics():
    dashboard = json.loads((TUNING / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        assert not unknown(query), query
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_the_runbook_has_a_section_for_each_alert():
    text = (TUNING / "runbook.md").read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE) == list(alerts())
    for section in text.split("\n## ")[1:]:
        for part in ("- Symptom: ", "- Metric: ", "- Cause: ", "- Action:\n  1. "):
            assert part in section, section
    anchors = re.findall(r"runbook: tuning/runbook\.md#(\w+)", ALERTS.read_text())
    assert anchors == [name.lower() for name in alerts()]
    # Metrics stand there without their prefix.
    known = metrics() | {name.removeprefix("bazel_remote_") for name in metrics()}
    known |= {re.sub("_(bucket|sum|count)$", "", name) for name in known}
    for named in re.findall(r"^- Metric: (.*)\.$", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", named):
            assert name == "up" or name in known, name


def test_promtool_takes_the_rules():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here; tests/run installs it")
    run = subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and f"{len(alerts())} rules found" in run.stdout, run


def test_kernel_settings_and_unit_can_be_read():
    for line in (TUNING / "sysctl.conf").read_text().splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"[a-z0-9_.]+ = [0-9 ]+", line), line
    unit = (TUNING / "ringcas.service").read_text()
    assert re.findall(r"^\[(\w+)\]$", unit, re.MULTILINE) == ["Unit", "Service", "Install"]
    for line in unit.splitlines():
        assert not line or line[0] in "#[" or re.fullmatch(r"[A-Z]\w+=.*", line), line
    # Without these the server does not start, or not with many cores.
    assert "LimitMEMLOCK=" in unit and "io_uring_setup" in unit and "AF_INET6" in unit


def test_systemd_takes_the_units(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd here")
    units = [tmp_path / name for name in ("ringcas.service", "ringcas.socket")]
    for unit in units:
        # It looks whether the program exists.
        unit.write_text((TUNING / unit.name).read_text().replace("/usr/bin/ringcas", "/bin/true"))
    run = subprocess.run([analyze, "verify", *units], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not run.stderr.strip(), run
