#!/usr/bin/env bash
# The kernels' tests and the benchmark on a GPU, with nothing installed but torch, triton, numpy and pytest.
#   bench/gpu.sh [tests|bench|all] [--dry-run]
# Rows and logs go to $OUT, or to bench/results. Together under ten minutes; the limits are TEST_SECONDS and
# BENCH_SECONDS. --dry-run needs no GPU: it imports everything, collects the tests and measures one point on the CPU.
# Exit status: 0; 1 where something failed; 2 without a GPU or for wrong arguments.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
what=all dry=
for word in "$@"; do
    case $word in
        tests | bench | all) what=$word ;;
        --dry-run) dry=yes ;;
        *) echo "gpu.sh: tests, bench, all or --dry-run, got $word" >&2; exit 2 ;;
    esac
done
if [ "$what" = all ]; then
    test_seconds=${TEST_SECONDS:-280} bench_seconds=${BENCH_SECONDS:-220}
else
    test_seconds=${TEST_SECONDS:-560} bench_seconds=${BENCH_SECONDS:-500}
fi

# What an install would make of the repository: reference and bench stand inside the package.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cp -r "$root/triton_specdec" "$root/tests" "$root/pyproject.toml" "$tree/"
cp -r "$root/reference" "$tree/triton_specdec/reference"
cp -r "$root/bench" "$tree/triton_specdec/bench"
git -C "$root" rev-parse --short=10 HEAD > "$tree/triton_specdec/bench/COMMIT" 2>/dev/null || rm -f "$tree/triton_specdec/bench/COMMIT"
export PYTHONPATH="$tree" PYTHONDONTWRITEBYTECODE=1
cd "$tree"

if [ -n "$dry" ]; then
    "$python" - <<'EOF' || exit 1
import importlib, pkgutil, sys
import triton_specdec, triton_specdec.bench
for package in (triton_specdec, triton_specdec.bench):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not module.name.split(".")[-1].startswith(("__", "bench_")):
            importlib.import_module(module.name)
assert triton_specdec.__file__.startswith(sys.path[1]), triton_specdec.__file__
print("imports work")
EOF
    "$python" -m pytest tests/test_*_kernels.py -k gpu --collect-only -q -p no:cacheprovider | tail -n 2 || exit 1
    "$python" -m triton_specdec.bench.run --quick --device cpu --stage filter --points 1 --out "$tree/dry.csv"
    exit
fi

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: there is no GPU here (torch.cuda.is_available() is false); try --dry-run" >&2
    exit 2
fi
out=${OUT:-$root/bench/results}
mkdir -p "$out"
status=0
if [ "$what" != bench ]; then
    files=(tests/test_*_kernels.py)
    workers=()
    "$python" -c 'import xdist' 2>/dev/null && workers=(-n "$(($(nproc) > 10 ? 10 : $(nproc)))")
    for file in "${files[@]}"; do
        limit=$((test_seconds / ${#files[@]}))
        timeout -k 10 "$limit" "$python" -m pytest "$file" -k gpu -q -p no:cacheprovider "${workers[@]}" 2>&1 |
            tee "$out/$(basename "$file" .py).log" | tail -n 15
        code=${PIPESTATUS[0]}
        [ "$code" = 124 ] && echo "gpu.sh: $file took longer than $limit s"
        # 5: no test of this file runs on a GPU.
        [ "$code" = 0 ] || [ "$code" = 5 ] || status=1
    done
fi
if [ "$what" != tests ]; then
    timeout -k 10 $((bench_seconds + 60)) "$python" -m triton_specdec.bench.run --full --seconds "$bench_seconds" \
        --out "$out/gpu.csv" 2>&1 | tee "$out/bench.log"
    [ "${PIPESTATUS[0]}" = 0 ] || status=1
fi
exit $status
