#!/bin/sh
# Runs the kernels under compute-sanitizer on small cases: memcheck (out-of-bounds and misaligned accesses, also of shared memory),
# then racecheck (shared-memory hazards). Needs a Hopper GPU, the built library and compute-sanitizer from the CUDA toolkit.
#
#   kernels/tools/sanitize.sh [memcheck|racecheck|initcheck|synccheck ...]
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH; it is part of the CUDA toolkit (bin/)" >&2; exit 2; }
[ $# -gt 0 ] || set -- memcheck racecheck

# PyTorch's caching allocator would hide an overrun inside a larger block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH="$root/kernels${PYTHONPATH:+:$PYTHONPATH}"

for tool in "$@"; do
    quick=
    case $tool in
        memcheck) ;;
        racecheck | initcheck | synccheck) quick=--quick ;;  # slower by far
        *) echo "unknown tool $tool; accepted: memcheck, racecheck, initcheck, synccheck" >&2; exit 2 ;;
    esac
    echo "compute-sanitizer $tool"
    # shellcheck disable=SC2086 # empty or one word
    compute-sanitizer --tool "$tool" --error-exitcode 1 --print-limit 20 \
        "${PYTHON:-python3}" "$root/kernels/tools/sanitize_cases.py" $quick
done
