#!/bin/sh
# The environment /opt/venv: what the pipeline imports on a node, every file with the hash that the lock has, then the peers that the argument
# names ("all", "none" or names with commas between). What was installed, and why a peer was not, is written into /opt/materials.
set -eu
if [ -f /mnt/pip.conf ]; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mkdir -p /opt/materials
python3 -m venv /opt/venv
mkdir -p /build/reports
/opt/venv/bin/python /build/locked.py --only /build/requirements.txt --report /build/reports/lock.json /build/requirements.lock
/opt/venv/bin/pip check
/opt/venv/bin/python /build/peers.py "$1" /opt/materials/peers.json /build/reports
/opt/venv/bin/python /build/packages.py /opt/materials/packages.json /build/reports/*.json
python3 -m venv /opt/sbom-tools
/opt/sbom-tools/bin/python /build/locked.py /build/tools.lock
/opt/sbom-tools/bin/cyclonedx-py environment --output-reproducible --of JSON -o /opt/materials/sbom.cdx.json /opt/venv/bin/python
