"""Packs this distribution (PEP 517) with Python's standard library only.

Any builder could pack it, but pip downloads builders, and this distribution must be installable beside ronde on hosts
without a network. So it contains its own.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pathlib
import re
import runpy
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
NAME = "horovod_compat"
COMMANDS = {"horovodrun": "horovod.runner.launch:run_commandline"}
# Extras that are ronde's; Horovod has most of them.
EXTRAS = [
    "all-dependencies",
    "all-frameworks",
    "dev",
    "keras",
    "lightning",
    "mxnet",
    "pytorch",
    "ray",
    "run",
    "spark",
    "tensorflow",
    "test",
    "torch",
]
# A fixed time for all files makes archives reproducible: the earliest that zip supports.
TIME = (1980, 1, 1, 0, 0, 0)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    """Builds the wheel. Returns its name. Says which of Horovod's variables for builds have no effect."""
    return pack(wheel_directory, {str(path.relative_to(HERE / "src")): path.read_bytes() for path in sources()})


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    """Builds a wheel that leads Python to this folder, for `pip install -e` (PEP 660). Returns its name."""
    return pack(wheel_directory, {f"_{NAME}.pth": f"{HERE / 'src'}\n".encode()})


def pack(wheel_directory: str, files: dict[str, bytes]) -> str:
    """Packs files and the metadata as a wheel. Returns its name."""
    functions = runpy.run_path(str(HERE / "src" / "horovod" / "build_variables.py"))
    for name in functions["build_variables"](os.environ):
        print(f"{name} has no effect: nothing is compiled, and one wheel serves all frameworks", file=sys.stderr)
    info = f"{NAME}-{version()}.dist-info"
    points = "".join(f"{command} = {function}\n" for command, function in COMMANDS.items())
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: backend.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{points}".encode()
    files[f"{info}/licenses/LICENSE"] = (HERE / "LICENSE").read_bytes()
    record = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    name = f"{NAME}-{version()}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, TIME)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return name


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """Builds the archive of sources. Returns its name."""
    folder = f"{NAME}-{version()}"
    own = [HERE / name for name in ("LICENSE", "README.md", "backend.py", "pyproject.toml")]
    files = {str(path.relative_to(HERE)): path.read_bytes() for path in [*own, *sources()]}
    files["PKG-INFO"] = metadata().encode()
    with tarfile.open(pathlib.Path(sdist_directory) / f"{folder}.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{folder}.tar.gz"


def sources() -> Iterator[pathlib.Path]:
    """Yields the files of the package, in a fixed order."""
    kept = (path for path in (HERE / "src" / "horovod").rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    return iter(sorted(kept))


def version() -> str:
    """Returns ronde's version; an archive of sources has it in its PKG-INFO."""
    packed, workspace = HERE / "PKG-INFO", HERE.parent.parent / "Cargo.toml"
    pattern, path = (r"(?m)^Version: (.+)$", packed) if packed.exists() else (r'(?m)^version = "([^"]+)"', workspace)
    found = re.search(pattern, path.read_text())
    if found is None:
        raise ValueError(f"{path} contains no version")
    return found[1]


def metadata() -> str:
    """Returns the metadata for pip and indexes."""
    extras = "".join(
        f'Provides-Extra: {extra}\nRequires-Dist: ronde[{extra}]=={version()}; extra == "{extra}"\n' for extra in EXTRAS
    )
    return f"""Metadata-Version: 2.4
Name: horovod-compat
Version: {version()}
Summary: The import name horovod and the command horovodrun, answered by ronde
Requires-Python: >=3.9
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: ronde=={version()}
{extras}Description-Content-Type: text/markdown

{(HERE / "README.md").read_text()}"""


def digest(content: bytes) -> str:
    """Returns the checksum of a file in the format of a wheel's record."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
