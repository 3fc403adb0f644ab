"""docs/monitoring names existing series. tests/engine checks the series of a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest
import yaml

from patches.series import SERIES
from tests.pages import DOCS

FOLDER = DOCS / "monitoring"
DASHBOARD = (FOLDER / "grafana/dashboards/json/sage-dashboard.json").read_text(encoding="utf-8")
ALERTS = (FOLDER / "alerts.yaml").read_text(encoding="utf-8")


def test_alerts_and_dashboard_rest_on_existing_series() -> None:
    names = re.findall(r"sage:(\w+)", ALERTS + DASHBOARD)
    assert {name.removesuffix("_bucket") for name in names} <= {*SERIES}


def test_mounts_of_the_compose_file_exist_and_are_read() -> None:
    services = yaml.safe_load((FOLDER / "docker-compose.yaml").read_text())["services"]
    for volume in [volume for service in services.values() for volume in service["volumes"]]:
        assert (FOLDER / volume.split(":")[0]).exists(), volume
    panels = json.loads(DASHBOARD)["panels"]
    source = yaml.safe_load((FOLDER / "grafana/datasources/datasource.yaml").read_text())
    (datasource,) = source["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels} == {datasource["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool on the PATH")
def test_prometheus_takes_the_configuration() -> None:
    command = ["promtool", "check", "config", str(FOLDER / "prometheus.yaml")]
    subprocess.run(command, check=True)
