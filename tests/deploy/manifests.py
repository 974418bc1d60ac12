"""Reads manifests, checks each against what its kind's maker published, and prints them and the mistakes as JSON.

    python manifests.py FILE...      FILE may be - for standard input

Runs in the environment `deploy`. Objects of Kubernetes itself are checked against its schemas, strictly. Those of
JobSet and Kubeflow Trainer are checked against the models of kubeflow-trainer-api, and no field may be unknown to them.
Pod templates in all of them are checked against the schema of a Pod. An object of another kind is a mistake, unless
PLAIN names it.
"""

from __future__ import annotations

import json
import pathlib
import sys
import warnings
from typing import Any

import kubernetes_validate
import pydantic
import yaml
from kubeflow_trainer_api import models

VERSION = "1.33"
MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
# Kinds without published schemas on PyPI, and the fields of their spec that this project uses.
PLAIN = {
    "MPIJob": {
        "slotsPerWorker",
        "sshAuthMountPath",
        "mpiImplementation",
        "launcherCreationPolicy",
        "runPolicy",
        "mpiReplicaSpecs",
    },
    "Certificate": {
        "secretName",
        "issuerRef",
        "uris",
        "duration",
        "renewBefore",
        "usages",
        "privateKey",
    },
}


def main() -> int:
    """Checks the files; returns the process's exit status."""
    warnings.filterwarnings("ignore", category=UserWarning)
    documents, mistakes = [], []
    for name in sys.argv[1:]:
        text = sys.stdin.read() if name == "-" else pathlib.Path(name).read_text()
        for document in filter(None, yaml.safe_load_all(text)):
            documents.append(document)
            mistakes.extend(f"{document['kind']}: {mistake}" for mistake in mistakes_of(document))
    json.dump({"documents": documents, "mistakes": mistakes}, sys.stdout)
    return 0


def mistakes_of(document: dict[str, Any]) -> list[str]:
    """What is wrong with an object."""
    found = [mistake for pod in pods(document) for mistake in against_schema(pod)]
    kind = document["kind"]
    if kind in MODELS:
        return found + against_model(document, MODELS[kind])
    if kind in PLAIN:
        return found + [f"spec.{field} is not a known field" for field in set(document["spec"]) - PLAIN[kind]]
    return found + against_schema(document)


def against_schema(document: dict[str, Any]) -> list[str]:
    """The mistakes that the schemas of Kubernetes show."""
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


def against_model(document: dict[str, Any], model: type[pydantic.BaseModel]) -> list[str]:
    """The mistakes that a model shows; what it leaves out when it writes the object again is unknown to it."""
    try:
        parsed = model.from_dict(document)
    except pydantic.ValidationError as error:
        return [str(error)]
    return [f"{path} is not a known field" for path in unknown(document, parsed.to_dict(), "")]


def unknown(given: Any, known: Any, path: str) -> list[str]:
    """The paths of what is in one tree and not in the other."""
    if isinstance(given, dict) and isinstance(known, dict):
        found = []
        for key, value in given.items():
            here = f"{path}.{key}"
            found += unknown(value, known[key], here) if key in known else [here]
        return found
    if isinstance(given, list) and isinstance(known, list):
        return [
            mistake for index, pair in enumerate(zip(given, known)) for mistake in unknown(*pair, f"{path}[{index}]")
        ]
    return []


def pods(tree: Any) -> list[dict[str, Any]]:
    """Every pod template in a tree, as an object of kind Pod."""
    if isinstance(tree, list):
        return [pod for branch in tree for pod in pods(branch)]
    if not isinstance(tree, dict):
        return []
    if "containers" in tree:
        return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": tree}]
    return [pod for branch in tree.values() for pod in pods(branch)]


if __name__ == "__main__":
    sys.exit(main())
