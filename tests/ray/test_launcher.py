"""The file for Ray's cluster launcher in docs/RAY.md, checked by Ray's own schema; nothing is started."""

from __future__ import annotations

import json
import pathlib
import re

import ray
import yaml
from conftest import ROOT


def test_the_file_of_the_page_fits_rays_schema() -> None:
    import jsonschema

    text = (ROOT / "docs" / "RAY.md").read_text()
    (block,) = re.findall(r"(?ms)^```yaml\n(# ray_cluster.yaml.*?)^```", text)
    schema = json.loads((pathlib.Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    described = yaml.safe_load(block)
    jsonschema.validate(described, schema)
    # The wheel is copied to the nodes: ronde is on no index.
    (install,) = [words for words in described["setup_commands"] if "pip install" in words]
    (folder,) = re.findall(r"(~\S+)/ronde-\*.*\.whl", install)
    assert folder in described["file_mounts"]
    kinds = described["available_node_types"]
    assert described["head_node_type"] in kinds
    assert max(kind.get("max_workers", 0) for kind in kinds.values()) <= described["max_workers"]
