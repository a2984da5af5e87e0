"""Renders the chart of deploy/helm with Helm's own code, and checks it: `make helm-test`. Needs the extra `helm`.

The manifests are checked against the schemas of Kubernetes, and the options and variables of each server are parsed by
the parsers of the commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

helm_python = pytest.importorskip("helm_python", reason="pip install '.[helm]'")

import kubernetes_validate  # noqa: E402
import yaml  # noqa: E402

from shardwell.options import JoinConfig  # noqa: E402
from shardwell_server.cli import build_parser  # noqa: E402
from shardwell_wire.model.topology import World  # noqa: E402

pytestmark = pytest.mark.helm

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/shardwell"
CUSTOM = {"Certificate", "ServiceMonitor"}
"""Kinds of other projects, whose schemas are not among those of Kubernetes."""

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "open": {"auth": {"secretName": ""}, "tls": {"secretName": ""}, "insecure": True},
    "trainers": {
        "trainers": {"enabled": True, "count": 8, "tp": 2, "run": "gpt", "checkpointDir": "/checkpoints/runs"},
        "checkpoints": {"root": "/checkpoints"},
        "shard": {
            "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
            "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
        },
    },
    "page": {"coordinator": {"dashboardPort": 8080}},
    "everything": {
        "imagePullSecrets": [{"name": "registry"}],
        "tls": {"certManager": {"enabled": True, "issuerRef": {"kind": "ClusterIssuer", "name": "own"}}},
        "checkpoints": {"root": "s3://bucket/runs", "envFrom": [{"secretRef": {"name": "bucket"}}]},
        "coordinator": {
            "env": [{"name": "SHARDWELL_LEASE_S", "value": "5"}],
            "storageClass": "fast",
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        },
        "shard": {
            "replicas": 5,
            "storageClass": "fast",
            "env": [{"name": "SHARDWELL_MEMORY_BUDGET", "value": "6GiB"}],
            "nodeSelector": {"disk": "ssd"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        },
        "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"role": "notebook"}}}]},
        "metrics": {
            "enabled": True,
            "serviceMonitor": True,
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
        "trainers": {
            "enabled": True,
            "env": [{"name": "SHARDWELL_BACKUPS", "value": "1"}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [{"key": "a", "operator": "Exists"}],
        },
    },
}


def render(values: dict[str, Any], name: str = "shardwell") -> list[dict[str, Any]]:
    with helm_python.Chart.load(CHART) as chart:
        rendered = chart.render(values=values, name=name, namespace="ml")
    texts = rendered.values() if isinstance(rendered, dict) else [rendered]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def containers(manifests: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields each pod's specification with its only container."""
    for manifest in manifests:
        if manifest["kind"] in ("StatefulSet", "Job"):
            pod = manifest["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            yield pod, container


@pytest.mark.parametrize("name", ["shardwell", "a"])
@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_manifests_fit_the_schemas(values: dict[str, Any], name: str) -> None:
    manifests = render(values, name)
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds.count("StatefulSet") == 2 and ("Job" in kinds) == values.get("trainers", {}).get("enabled", False)
    for manifest in manifests:
        assert manifest["metadata"]["name"].startswith("shardwell" if name == "shardwell" else "a-shardwell")
        if manifest["kind"] not in CUSTOM:
            for version in ("1.29", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(manifest, version, strict=True)


def test_chart_passes_lint() -> None:
    found = helm_python.chart.lint(CHART)
    assert found["total_charts_linted"] == 1 and not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_servers_accept_their_options_and_variables(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SHARDWELL_")]:
        monkeypatch.delenv(name)
    for _, container in containers(render(values)):
        if container["name"] == "trainer":
            continue
        given = {each["name"]: each.get("value", "shardwell-shard-0") for each in container["env"]}
        options = {action.dest for action in _options_of(container["args"][0])} | {"address"}  # of clients
        names = {name.removeprefix("SHARDWELL_").lower() for name in given}
        assert names <= options
        assert ("metrics_port" in names) == bool(values.get("metrics", {}).get("enabled"))
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            arguments = [word.replace("/shared", "/dev/shm") for word in container["args"]]
            parsed = build_parser(container["args"][0]).parse_args(arguments)
        assert parsed.state_dir == "/var/lib/shardwell" and parsed.listen.startswith("0.0.0.0:")
        assert parsed.token_file == given.get("SHARDWELL_TOKEN_FILE", "")
        if container["name"] == "shard":
            assert (parsed.id, parsed.own_memory_limit) == ("shardwell-shard-0", True)
            assert parsed.coordinator == "shardwell-coordinator.ml.svc:50051"


def _options_of(command: str) -> list[Any]:
    parser = build_parser(command)
    (commands,) = [action for action in parser._actions if hasattr(action, "choices") and action.choices]
    return list(commands.choices[command]._actions)  # type: ignore[union-attr,index]


def test_trainers_join_with_their_variables() -> None:
    (container,) = [each for _, each in containers(render(VALUES["trainers"])) if each["name"] == "trainer"]
    given = {each["name"]: each.get("value", "3").replace("$(INDEX)", "3") for each in container["env"]}
    config = JoinConfig.from_env({}, given)
    assert (config.run, config.trainer, config.world) == ("gpt", "trainer-3", World(dp=4, tp=2))
    assert config.address == "shardwell-coordinator.ml.svc:50051" and config.min_trainers == 2
    assert (config.checkpoint_dir, config.checkpoint_every) == ("/checkpoints/runs", 100)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_pods_have_no_rights_and_trainers_no_secret_of_servers(values: dict[str, Any]) -> None:
    manifests = render(values)
    assert not {"ConfigMap", "Secret"} & {manifest["kind"] for manifest in manifests}, "secrets are named only"
    for pod, container in containers(manifests):
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]} and pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"] and not pod["enableServiceLinks"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} | {"state"} >= mounted
        if container["name"] == "trainer":
            secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
            assert {"secretName": "shardwell-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]} in secrets
            assert "shardwell-key" not in str(pod)


def test_stop_of_a_server_has_time_to_drain_and_to_save() -> None:
    for manifest in render({}):
        if manifest["kind"] == "StatefulSet" and manifest["metadata"]["name"].endswith("shard"):
            pod = manifest["spec"]["template"]["spec"]
            (container,) = pod["containers"]
            (drain,) = [word for word in container["args"] if word.startswith("--drain-s=")]
            assert pod["terminationGracePeriodSeconds"] > float(drain.partition("=")[2])
            (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shared"]
            assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": container["resources"]["limits"]["memory"]}


def test_probes_work_with_and_without_tls() -> None:
    for values, kind in ((VALUES["defaults"], "exec"), (VALUES["open"], "grpc")):
        for _, container in containers(render(values)):
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container[name]
                assert kind in probe, "the kubelet's gRPC probes know no TLS"
                if kind == "exec":
                    command, *arguments = probe["exec"]["command"]
                    assert command == "shardwell-server" and build_parser("health").parse_args(arguments).service


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"auth": {"secretName": ""}}, "insecure=true"),
        ({"tls": {"certManager": {"enabled": True}}}, "issuerRef.name"),
        ({"shard": {"terminationGracePeriodSeconds": 60}}, "greater than shard.drainSeconds"),
        ({"trainers": {"enabled": True, "count": 3, "tp": 2}}, r"not a multiple of tp \* pp = 2"),
        ({"trainers": {"enabled": True, "tokenSecretName": ""}}, "make a token"),
        ({"shards": {"replicas": 3}}, "shards"),
        ({"shard": {"replicas": "3"}}, "replicas"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.errors.HelmError) as refused:
        render(values)
    assert re.search(message, str(refused.value)), refused.value
