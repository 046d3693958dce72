#!/bin/sh
# Puts what an image holds into /out: a Python, the packages of a lock, ours, and their bill of materials.
#
#     sh packages.sh LOCK
#
# Run by deploy/Dockerfile in a build stage, at the root of the sources.
set -eu
python3 -m venv --without-pip /opt/sottovoce
/build/bin/pip --python /opt/sottovoce install --no-compile --require-hashes -r "deploy/requirements/$1.txt"
/build/bin/pip --python /opt/sottovoce install --no-compile --no-cache-dir --no-deps /wheel/*.whl
/build/bin/python -m cyclonedx_py environment --output-reproducible --pyproject pyproject.toml \
  -o /opt/sottovoce/sbom.cdx.json /opt/sottovoce
python3 deploy/gather.py /opt/sottovoce /out
