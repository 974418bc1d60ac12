"""What the manifests and the chart claim: schemas, restricted containers, no tokens, closed networks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import CHART, ROOT, Rendered

KUBERNETES = ROOT / "compose" / "kubernetes"
# The manifests that are the chart's output: form, name, and settings.
MADE = {
    "jobset.yaml": ("jobset", "digits", []),
    "runtime.yaml": ("trainer", "ronde-torch", []),
    "mpijob.yaml": ("mpi", "digits", ["workersPerNode=2"]),
}
HEADER = "# Made by `helm template {name} compose/kubernetes/chart --set {settings}`; do not edit.\n"
FILES = [*MADE, "trainjob.yaml"]
KINDS = ["secret", "certificates", "cert-manager", "spiffe"]
FORMS = [
    (form, kind)
    for form in ["jobset", "trainer", "mpi"]
    for kind in KINDS
    if (form, kind) != ("trainer", "cert-manager")
]


@pytest.mark.parametrize("name", MADE)
def test_a_manifest_is_the_output_of_the_chart(name: str, rendered: Rendered) -> None:
    form, job, settings = MADE[name]
    text = HEADER.format(name=job, settings=",".join([f"form={form}", *settings]))
    text += re.sub(r"# Source: .*\n", "", rendered.text(form, *settings, name=job))
    path = KUBERNETES / name
    if os.environ.get("RONDE_REGENERATE") == "1":
        path.write_text(text)
    assert path.read_text() == text, f"{name} is out of date; run this test with RONDE_REGENERATE=1"


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_keeps_what_the_readme_claims(name: str, rendered: Rendered) -> None:
    hold(rendered.read(KUBERNETES / name))


@pytest.mark.parametrize(("form", "kind"), FORMS)
def test_every_form_keeps_it(form: str, kind: str, rendered: Rendered) -> None:
    hold(
        rendered(form, f"credentials.kind={kind}", "metrics.enabled=true", "nodes=3", "workersPerNode=2", name="train")
    )


def hold(objects: dict[str, list[dict[str, Any]]]) -> None:
    """Fails for a container, a pod or a policy that is more open than the README says."""
    found = [pod for kind in objects.values() for document in kind for pod in pods(document)]
    for spec in found:
        hold_pod(spec)
    for policy in objects.get("NetworkPolicy", []):
        hold_policy(policy)
    # A runtime is for jobs of other names: trainjob.yaml has the policy.
    if found and "ClusterTrainingRuntime" not in objects:
        (policy,) = objects["NetworkPolicy"]
        selector = policy["spec"]["podSelector"]["matchLabels"]
        for document in [*objects.get("JobSet", []), *objects.get("MPIJob", [])]:
            templates = list(templates_of(document))
            assert templates
            for template in templates:
                assert selector.items() <= template["metadata"]["labels"].items(), "the policy does not select a pod"


def hold_pod(spec: dict[str, Any]) -> None:
    """A pod has no token of the API and nothing of its node, and each container is restricted."""
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    for shared in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"]:
        assert shared not in spec
    allowed = {"emptyDir", "secret", "configMap", "projected", "csi"}
    for volume in spec["volumes"]:
        assert set(volume) - {"name"} <= allowed, volume
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["privileged"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "memory" in container["resources"]["limits"]
        assert "requests" in container["resources"]
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        if container["name"] == "node":
            assert not mounted & {"ronde-private", "ronde-secret", "spiffe-workload-api"}, "a worker has keys"
            (sockets,) = [m for m in container["volumeMounts"] if m["name"] == "ronde-sockets"]
            assert sockets == {
                "name": "ronde-sockets",
                "mountPath": "/run/ronde",
                "subPath": "sockets",
                "readOnly": True,
            }
        if container["name"] == "ronde-sidecar":
            node = spec["containers"][0]["securityContext"]
            assert context["runAsUser"] != node["runAsUser"], "workers could read the sidecar's files"
            assert context["runAsGroup"] == node["runAsGroup"] == spec["securityContext"]["fsGroup"]
            assert f"--worker-uids={node['runAsUser']}" in container["args"]
            assert container["restartPolicy"] == "Always"
            assert "ronde-secret" not in mounted


def hold_policy(policy: dict[str, Any]) -> None:
    """A policy closes both directions; pods of the job reach each other at a few ports, and DNS."""
    spec = policy["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    assert spec["podSelector"]["matchLabels"]
    own = [{"podSelector": spec["podSelector"]}]
    for rule in spec["ingress"]:
        assert rule["from"], "everybody may come"
        assert rule["ports"], "at any port"
        if rule["from"] != own:
            assert [port["port"] for port in rule["ports"]] == [9400]
            assert "podSelector" in rule["from"][0]
            assert "namespaceSelector" in rule["from"][0]
    own_ports = [rule["ports"] for rule in spec["ingress"] if rule["from"] == own]
    assert [rule["ports"] for rule in spec["egress"] if rule["to"] == own] == own_ports
    for port in own_ports[0]:
        assert port in [
            {"protocol": "TCP", "port": 7400, "endPort": 7404},
            {"protocol": "UDP", "port": 7400, "endPort": 7404},
            {"protocol": "TCP", "port": 7400, "endPort": 7439},
            {"protocol": "UDP", "port": 7400, "endPort": 7439},
            {"protocol": "TCP", "port": 2222},
        ], port
    others = [rule for rule in spec["egress"] if rule["to"] != own]
    assert [[port["port"] for port in rule["ports"]] for rule in others] == [[53, 53]]


def templates_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Every pod template."""
    if isinstance(tree, dict):
        if "containers" in tree.get("spec", {}) if isinstance(tree.get("spec"), dict) else False:
            yield tree
        for branch in tree.values():
            yield from templates_of(branch)
    elif isinstance(tree, list):
        for branch in tree:
            yield from templates_of(branch)


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of an object."""
    return [template["spec"] for template in templates_of(document)]


def test_values_act(rendered: Rendered) -> None:
    settings = [
        "nodes=3",
        "sidecar.port=8000",
        "credentials.secretName=mine",
        "sidecar.startTimeout=60",
        "maxRestarts=4",
    ]
    objects = rendered("jobset", *settings, "worker.env[0].name=A", "worker.env[0].value=b", name="train")
    (jobset,) = objects["JobSet"]
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 4}
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (3, 3, 0)
    (spec,) = pods(jobset)
    prepare, sidecar = spec["initContainers"]
    variables = {entry["name"]: entry.get("value") for entry in prepare["env"]}
    assert (variables["RONDE_NODES"], variables["RONDE_PORT"]) == ("3", "8000")
    assert "--start-timeout=60" in sidecar["args"]
    assert sidecar["startupProbe"]["failureThreshold"] * sidecar["startupProbe"]["periodSeconds"] == 60
    assert {"name": "A", "value": "b"} in spec["containers"][0]["env"]
    assert {"secretName": "mine", "defaultMode": 0o440} in [volume.get("secret") for volume in spec["volumes"]]
    ports = objects["NetworkPolicy"][0]["spec"]["ingress"][0]["ports"]
    assert [(port["port"], port["endPort"]) for port in ports] == [(8000, 8004), (8000, 8004)]


def test_cert_manager_issues_what_sidecars_ask_for(rendered: Rendered) -> None:
    objects = rendered("jobset", "credentials.kind=cert-manager", name="train")
    uris = [certificate["spec"]["uris"] for certificate in objects["Certificate"]]
    assert uris == [[f"spiffe://ronde.local/job/train/sidecar/{index}"] for index in range(2)]
    (spec,) = pods(objects["JobSet"][0])
    volume = next(volume for volume in spec["volumes"] if volume["name"] == "ronde-secret")
    sources = [source["secret"] for source in volume["projected"]["sources"]]
    assert [source["name"] for source in sources] == [c["spec"]["secretName"] for c in objects["Certificate"]]
    assert [item["path"] for item in sources[1]["items"]] == [f"sidecar-1-{n}.pem" for n in ["cert", "key", "ca"]]


def test_only_those_who_need_it_may_use_the_workload_api(rendered: Rendered) -> None:
    (spec,) = pods(rendered("jobset", "credentials.kind=spiffe", name="train")["JobSet"][0])
    users = {
        container["name"]
        for container in [*spec["initContainers"], *spec["containers"]]
        for mount in container["volumeMounts"]
        if mount["name"] == "spiffe-workload-api"
    }
    assert users == {"spiffe-helper"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("form=daemonset", "form"),
        ("nodes=0", "nodes"),
        ("workersPerNode=65", "workersPerNode"),
        ("worker.uid=0", "uid"),
        ("sidecar.lanes=4", "additional properties 'lanes' not allowed"),
        ("credentials.kind=none", "kind"),
        ("form=trainer,credentials.kind=cert-manager", "a runtime does not know the names of its TrainJobs"),
        ("sidecar.uid=10002", "sidecar.uid and worker.uid are equal"),
    ],
)
def test_wrong_values_are_refused(setting: str, words: str, rendered: Rendered) -> None:
    done = rendered.helm("template", "train", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr


def test_the_chart_has_no_lints(rendered: Rendered) -> None:
    done = rendered.helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("jobset.yaml", "backoffLimit:", "backofLimit:"),
        ("jobset.yaml", "failurePolicy: {maxRestarts", "failurePolicy: {maxRestart"),
        ("jobset.yaml", "mountPath:", "mountpath:"),
        ("runtime.yaml", "containerNames:", "containers:"),
        ("runtime.yaml", "startupProbe:", "startupProb:"),
        ("trainjob.yaml", "numNodes: 2", 'numNodes: "2"'),
        ("trainjob.yaml", "numProcPerNode:", "numProcsPerNode:"),
        ("trainjob.yaml", "policyTypes: [Ingress, Egress]", "policyTypes: Ingress"),
        ("mpijob.yaml", "slotsPerWorker:", "slotPerWorker:"),
        ("mpijob.yaml", "readinessProbe:", "readinesProbe:"),
    ],
)
def test_mistakes_are_found(name: str, old: str, new: str, rendered: Rendered) -> None:
    """The checks themselves: a misspelt field is seen in every kind."""
    text = (KUBERNETES / name).read_text()
    assert old in text
    _, mistakes = rendered.check(text.replace(old, new, 1))
    assert mistakes, f"{new} in {name} was not noticed"


def test_open_pods_are_found(rendered: Rendered) -> None:
    """The checks themselves: each claim can fail."""
    text = (KUBERNETES / "jobset.yaml").read_text()
    changes = [
        ("automountServiceAccountToken: false", "automountServiceAccountToken: true"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false"),
        ("capabilities: {drop: [ALL]}", "capabilities: {drop: [NET_RAW]}"),
        ("subPath: sockets, readOnly: true", "subPath: sockets"),
        ("policyTypes: [Ingress, Egress]", "policyTypes: [Ingress]"),
        ("endPort: 7404", "endPort: 7500"),
        ("name: ronde-tools, mountPath: /run/ronde-tools, readOnly: true", "name: ronde-private, mountPath: /run/x"),
        (
            "app.kubernetes.io/instance: digits\n            spec:",
            "app.kubernetes.io/instance: other\n            spec:",
        ),
    ]
    assert [old for old, _ in changes if old not in text] == []
    # All of them in one call, as each takes a second to start.
    documents, mistakes = rendered.check("\n---\n".join([text, *(text.replace(*change, 1) for change in changes)]))
    assert mistakes == []
    good, *bad = [{"NetworkPolicy": [policy], "JobSet": [job]} for policy, job in zip(documents[::2], documents[1::2])]
    hold(good)
    unseen = [new for (_, new), objects in zip(changes, bad) if not is_open(objects)]
    assert unseen == [], "these were not noticed"


def is_open(objects: dict[str, list[dict[str, Any]]]) -> bool:
    """Whether something is more open than the README says."""
    try:
        hold(objects)
    except AssertionError:
        return True
    return False
