#!/bin/sh
# Python with venv and headers, and a C++ compiler, from the distribution's packages where the base has not got them.
set -eu
if python3 -c 'import ensurepip, sysconfig, os, venv; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null &&
    command -v c++ > /dev/null && [ -d /etc/ssl/certs ]; then
    exit 0
fi
if ! command -v apt-get > /dev/null; then
    echo "the base has no Python with venv and headers, or no C++ compiler, and no apt-get to install them: use a Debian or Ubuntu base," \
        "or one that has them" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends python3 python3-venv python3-dev g++ ca-certificates > /dev/null
rm -rf /var/lib/apt/lists/*
