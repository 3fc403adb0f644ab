"""docs/monitoring names existing series. tests/engine checks a real server's."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from patches.series import SERIES

ROOT = Path(__file__).parents[1] / "docs"
ALERTS = yaml.safe_load((ROOT / "monitoring" / "alerts.yaml").read_text())["groups"][0]["rules"]


def test_alerts_and_dashboard_rest_on_series_that_there_are() -> None:
    for file in ("alerts.yaml", "grafana/dashboards/json/sage-dashboard.json"):
        text = (ROOT / "monitoring" / file).read_text(encoding="utf-8")
        named = {re.sub("_bucket$", "", name) for name in re.findall(r"sage:(\w+)", text)}
        assert named <= set(SERIES), file
    assert all(alert["annotations"]["what_to_do"] for alert in ALERTS)


def test_what_the_compose_file_mounts_is_there_and_is_read() -> None:
    folder = ROOT / "monitoring"
    services = yaml.safe_load((folder / "docker-compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:
            assert (folder / volume.split(":")[0]).exists(), volume
    dashboard = json.loads((folder / "grafana/dashboards/json/sage-dashboard.json").read_text())
    source = yaml.safe_load((folder / "grafana/datasources/datasource.yaml").read_text())
    uids = {panel["datasource"]["uid"] for panel in dashboard["panels"]}
    assert uids == {source["datasources"][0]["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_takes_the_configuration() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("there is no promtool on the PATH")
    command = [promtool, "check", "config", str(ROOT / "monitoring" / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout
