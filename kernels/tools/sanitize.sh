#!/bin/sh
# Runs the kernels under compute-sanitizer on small cases: memcheck (out-of-bounds and misaligned accesses, also of shared memory),
# then racecheck (shared-memory hazards). Anything found is an error. Needs a Hopper GPU and the CUDA toolkit.
#
#   kernels/tools/sanitize.sh [memcheck|racecheck|initcheck|synccheck ...]
#
# racecheck runs a library of its own, built here with TURBOPAIR_RACECHECK (csrc/tma.cuh): where one lane arrives at a memory barrier
# for its warp, racecheck takes what the other lanes wrote for unordered. In that library every lane arrives. The copies of the bulk
# engine and the operands of wgmma are outside what racecheck sees, in either library.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH; it is part of the CUDA toolkit (bin/)" >&2; exit 2; }
[ $# -gt 0 ] || set -- memcheck racecheck

# PyTorch's caching allocator would hide an overrun inside a larger block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH="$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
if command -v ninja >/dev/null; then export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

for tool in "$@"; do
    quick= library=${TURBOPAIR_LIBRARY:-}
    case $tool in
        memcheck) ;;
        racecheck)
            quick=--quick  # slower by far
            NVCC_APPEND_FLAGS=-DTURBOPAIR_RACECHECK cmake -S "$root/kernels" -B "$scratch/build" -DTURBOPAIR_REQUIRE_CUDA=ON >"$scratch/log" 2>&1 &&
                NVCC_APPEND_FLAGS=-DTURBOPAIR_RACECHECK cmake --build "$scratch/build" --parallel >>"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 2; }
            library=$scratch/build/libturbopair.so
            ;;
        initcheck | synccheck) quick=--quick ;;
        *) echo "unknown tool $tool; accepted: memcheck, racecheck, initcheck, synccheck" >&2; exit 2 ;;
    esac
    echo "compute-sanitizer $tool"
    # PyTorch's own kernels are not instrumented. An unset TURBOPAIR_LIBRARY means the library of the checkout or the installation.
    # shellcheck disable=SC2086 # $quick is empty or one word
    env ${library:+"TURBOPAIR_LIBRARY=$library"} compute-sanitizer --tool "$tool" --kernel-name kns=turbopair --error-exitcode 1 --print-limit 20 \
        "${PYTHON:-python3}" "$root/kernels/tools/sanitize_cases.py" $quick
done
