"""The examples for Kubernetes and llm-d are well formed, and their names exist."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from patches.series import SERIES
from predictor_store.service import serve_command
from sage_sched.app.config import SageConfig
from tests.pages import DOCS

MANIFEST = DOCS / "kubernetes.yaml"


def sources_of(module: str) -> str:
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr]
    return Path(folder, module).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The manifest's objects, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def test_its_parts_fit_each_other(manifest: dict[str, Any]) -> None:
    spec = manifest["Deployment"]["spec"]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    for selector in (spec["selector"]["matchLabels"], manifest["Service"]["spec"]["selector"]):
        assert selector.items() <= labels.items()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = [mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]]
    assert {*mounted} == volumes.keys()
    assert volumes["config"]["configMap"]["name"] == manifest["ConfigMap"]["metadata"]["name"]
    claim = volumes["store"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest["PersistentVolumeClaim"]["metadata"]["name"]
    assert manifest["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_probes_ask_routes_of_sglang_at_its_port(manifest: dict[str, Any]) -> None:
    server = manifest["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    (port,) = server["ports"]
    assert f"--port={port['containerPort']}" in server["args"]
    routes = sources_of("srt/entrypoints/http_server.py")
    # /health then fails without an answer.
    (waits_s,) = re.findall(r'"SGLANG_HEALTH_CHECK_TIMEOUT", (\d+)\)', routes)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = server[probe]["httpGet"]
        assert asked["port"] == port["name"]
        assert f'@app.get("{asked["path"]}")' in routes
        assert asked["path"] != "/health" or server[probe]["timeoutSeconds"] > int(waits_s)


def test_server_and_predictor_meet_at_one_address(manifest: dict[str, Any]) -> None:
    files = manifest["ConfigMap"]["data"]
    settings = {name: SageConfig.parse(tomllib.loads(text)) for name, text in files.items()}
    containers = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    server, predictor = containers
    parser = argparse.ArgumentParser()
    serve_command.configure(parser)
    asked = parser.parse_args(predictor["args"])
    assert predictor["command"] == ["sage-sched", "predictor", "serve"]
    assert Path(asked.sage_config).name in settings
    assert asked.listen == settings["server.toml"].predictor.service
    assert "--sage-config=/etc/sage/server.toml" in server["args"]
    places = [{m["name"]: m["mountPath"] for m in one["volumeMounts"]} for one in containers]
    assert places[0]["run"] == places[1]["run"] == str(Path(asked.listen).parent)
    assert Path(settings["predictor.toml"].store.path).is_relative_to(places[1]["store"])


def test_llm_d_scores_by_a_metric_of_ours() -> None:
    shown = yaml.safe_load((DOCS / "examples" / "llm-d.yaml").read_text(encoding="utf-8"))
    plugins = {plugin.get("name", plugin["type"]): plugin for plugin in shown["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    (metric,) = engine["customMetrics"]
    assert metric["attributeKey"] == plugins["backlog"]["parameters"]["attributeKey"]
    assert metric["metricSpec"].removeprefix("sage:") in SERIES
    collector = sources_of("srt/observability/metrics_collector.py")
    for spec in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"):
        assert f'name="{engine[spec]}"' in collector
    assert {one["pluginRef"] for one in shown["schedulingProfiles"][0]["plugins"]} <= {*plugins}
