#!/bin/sh
# The environment /opt/venv: what the pipeline imports on a node, in the versions of the lock, then the peers that the argument names
# ("all", "none" or names with commas between). What was installed, and why a peer was not, is written into /opt/materials.
set -eu
if [ -f /mnt/pip.conf ]; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mkdir -p /opt/materials
python3 -m venv /opt/venv
mkdir -p /build/reports
/opt/venv/bin/pip install -q --report /build/reports/lock.json -c /build/requirements.lock -r /build/requirements.txt
/opt/venv/bin/python /build/peers.py "$1" /opt/materials/peers.json
/opt/venv/bin/python /build/packages.py /opt/materials/packages.json /build/reports/*.json
python3 -m venv /opt/sbom-tools
/opt/sbom-tools/bin/pip install -qq -r /build/tools.txt
/opt/sbom-tools/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/materials/sbom.cdx.json /opt/venv/bin/python
