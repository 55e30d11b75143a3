#!/bin/sh
# Compiles the kernel library into /opt/kernels. The argument: "required" fails where nvcc is missing, "optional" goes on and says so.
set -eu
case $1 in
    required) require=ON ;;
    optional) require=OFF ;;
    *) echo "KERNELS is '$1'; accepted: required, optional" >&2 && exit 1 ;;
esac
if [ -f /mnt/pip.conf ]; then export PIP_CONFIG_FILE=/mnt/pip.conf; fi
python3 -m venv /opt/build-tools
grep -E '^(cmake|ninja)==' /build/requirements.lock > /build/build-tools.lock
/opt/build-tools/bin/pip install -qq --disable-pip-version-check --no-cache-dir --require-hashes --no-deps -r /build/build-tools.lock
PATH=/opt/build-tools/bin:$PATH
cmake -S /build/kernels -B /build/out -G Ninja -DTURBOPAIR_REQUIRE_CUDA="$require" -DPython3_EXECUTABLE=/usr/bin/python3
cmake --build /build/out
mkdir -p /opt/kernels
for name in libturbopair.so libturbopair.json source_digest.txt; do
    if [ -f "/build/out/$name" ]; then cp "/build/out/$name" /opt/kernels/; fi
done
