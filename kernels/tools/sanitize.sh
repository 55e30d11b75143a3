#!/bin/sh
# Runs the kernels under compute-sanitizer on small cases: memcheck (out-of-bounds and misaligned accesses, also of shared memory),
# then racecheck (shared-memory hazards). Anything found is an error. Needs a Hopper GPU and the CUDA toolkit.
#
#   kernels/tools/sanitize.sh [attention|multiplication ...] [memcheck|racecheck|initcheck|synccheck ...]
#
# racecheck runs a library of its own for attention, built here with TURBOPAIR_RACECHECK (csrc/tma.cuh): where one lane arrives at a memory
# barrier for its warp, racecheck takes what the other lanes wrote for unordered. In that library every lane arrives. The copies of the bulk
# engine and the operands of wgmma are outside what racecheck sees, in either library and in triangle multiplication's kernels.
#
# Of those racecheck reports, in each one that has partitions of warps, how Triton tells them what to run. sanitize_racecheck.py leaves
# exactly that out of the verdict.
#
# They are compiled by Triton at their first call, here or before (TRITON_CACHE_DIR keeps them). initcheck leaves them out: only they are
# instrumented, so that what cuBLAS writes for them would count as never written.
set -eu
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH; it is part of the CUDA toolkit (bin/)" >&2; exit 2; }
operators= tools=
for word in "$@"; do
    case $word in
        attention | multiplication) operators="$operators $word" ;;
        memcheck | racecheck | initcheck | synccheck) tools="$tools $word" ;;
        *) echo "unknown argument $word; accepted: attention, multiplication, memcheck, racecheck, initcheck, synccheck" >&2; exit 2 ;;
    esac
done

# PyTorch's caching allocator would hide an overrun inside a larger block.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
export PYTHONPATH="$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
if command -v ninja >/dev/null; then export CMAKE_GENERATOR="${CMAKE_GENERATOR:-Ninja}"; fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# PyTorch's own kernels are not instrumented: $options has filters of names. $quick is empty or one word. $found is the exit status where
# the program succeeds and the tool finds something.
found=1 limit=20
sanitize() { # OPERATOR TOOL CASES
    quick=
    [ "$2" = memcheck ] || quick=--quick # the others are slower by far
    echo "compute-sanitizer $2, triangle $1"
    # shellcheck disable=SC2086
    compute-sanitizer --tool "$2" $options --error-exitcode "$found" --print-limit "$limit" "${PYTHON:-python3}" "$root/kernels/tools/$3" $quick
}

attention() { # TOOL
    options='--kernel-name kns=turbopair'
    if [ "$1" = racecheck ]; then
        NVCC_APPEND_FLAGS=-DTURBOPAIR_RACECHECK cmake -S "$root/kernels" -B "$scratch/build" -DTURBOPAIR_REQUIRE_CUDA=ON >"$scratch/log" 2>&1 &&
            NVCC_APPEND_FLAGS=-DTURBOPAIR_RACECHECK cmake --build "$scratch/build" --parallel >>"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 2; }
        (export TURBOPAIR_LIBRARY="$scratch/build/libturbopair.so" && sanitize attention "$1" sanitize_cases.py)
    else
        # An unset TURBOPAIR_LIBRARY means the library of the checkout or the installation.
        sanitize attention "$1" sanitize_cases.py
    fi
}

multiplication() { # TOOL
    if [ "$1" = initcheck ]; then
        echo "initcheck leaves out triangle multiplication, whose operands cuBLAS writes" >&2
        return
    fi
    # By name, as cuda.py lists them: Triton's kernels carry no prefix.
    options=$(sed -n 's/^ *self\.[a-z_]* = Kernel([a-z_]*\.\([a-z_]*\))$/--kernel-name kns=\1/p' "$root/kernels/turbopair/triangle_multiplication/cuda.py")
    [ -n "$options" ] || { echo "no kernels found in triangle_multiplication/cuda.py; this script reads their names there" >&2; exit 2; }
    # Allocations lie side by side: without a gap, one that is overrun by a row may end where the next begins.
    [ "$1" != memcheck ] || options="$options --padding 4096"
    if [ "$1" = racecheck ]; then
        (
            found=9 limit=1000 status=0
            sanitize multiplication "$1" sanitize_multiplication_cases.py >"$scratch/racecheck" 2>&1 || status=$?
            cat "$scratch/racecheck"
            [ "$status" = 0 ] || [ "$status" = "$found" ] || exit "$status"
            "${PYTHON:-python3}" "$root/kernels/tools/sanitize_racecheck.py" "$scratch/racecheck" "$limit"
        )
    else
        sanitize multiplication "$1" sanitize_multiplication_cases.py
    fi
}

for tool in ${tools:-memcheck racecheck}; do
    for operator in ${operators:-attention multiplication}; do
        "$operator" "$tool"
    done
done
