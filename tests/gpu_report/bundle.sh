#!/usr/bin/env bash
# Pack what a machine with a GPU, but without a network, needs for the report: see the usage.
set -euo pipefail
usage='bundle.sh [--part-mb N] PYTHON MODEL OUT [WHEEL ...]

Write to the folder OUT parts of at most N MB (default 50) and join.sh, which verifies and joins them.
They hold the committed tree, the artifact MODEL, wheels for CPython 3.12 of the packages that serve,
without torch and engines, and the given wheels, such as that of onnxruntime-gpu.
PYTHON is an interpreter with pip.'
megabytes=50
if [ "${1:-}" = --part-mb ]; then
  megabytes=$2
  shift 2
fi
if [ $# -lt 3 ]; then
  echo "usage: $usage" >&2
  exit 2
fi
python=$1 model=$2 out=$3
shift 3
case $megabytes in
'' | *[!0-9]* | 0) echo "bundle.sh: --part-mb must be a number of megabytes, not $megabytes" >&2; exit 2 ;;
esac
[ -f "$model/manifest.json" ] || { echo "bundle.sh: $model is not an artifact" >&2; exit 2; }
root=$(git rev-parse --show-toplevel)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/vitrine" "$work/wheels" "$work/given"
if [ -n "$(ls -A "$out")" ]; then
  echo "bundle.sh: $out is not empty" >&2
  exit 2
fi
git -C "$root" archive HEAD | tar --extract --directory "$work/vitrine"
mkdir -p "$work/vitrine/artifacts"
cp -r "$model" "$work/vitrine/artifacts/"
"$python" - "$root/pyproject.toml" > "$work/wheels/requirements.txt" <<'END'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")
END
platforms=()
for number in 17 24 27 28 31 34 35; do
  platforms+=(--platform "manylinux_2_${number}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --implementation cp \
  --python-version 3.12 --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 \
  --constraint "$root/constraints.txt" --requirement "$work/wheels/requirements.txt" --dest "$work/wheels"
for wheel in "$@"; do
  cp "$wheel" "$work/given/"
done
tar --create --directory "$work" vitrine wheels given | split --bytes "${megabytes}MB" --numeric-suffixes \
  --suffix-length 3 - "$out/part-"
cat > "$out/join.sh" <<'END'
#!/bin/sh
# Verify the parts beside this file, and unpack them into a folder.
set -eu
folder=$(realpath --canonicalize-missing "${1:?the folder to unpack into is missing}")
cd "$(dirname "$0")"
sha256sum --check --quiet SHA256SUMS
mkdir -p "$folder"
cat part-* | tar --extract --directory "$folder"
cd "$folder"
python3 -m pip install --quiet --no-index --find-links wheels --requirement wheels/requirements.txt
# The service reads its version from the installed package.
python3 -m pip install --quiet --no-index --no-deps --no-build-isolation ./vitrine
for wheel in given/*.whl; do
  [ ! -e "$wheel" ] || python3 -m pip install --quiet --no-index --no-deps --target packages "$wheel"
done
echo "Run: cd $PWD/vitrine && PYTHONPATH=$PWD/packages python3 -m tests.gpu_report --out $PWD/report"
END
chmod +x "$out/join.sh"
(cd "$out" && sha256sum part-* > SHA256SUMS)
du --human-readable --summarize "$out"
