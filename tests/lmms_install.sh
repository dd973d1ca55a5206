#!/bin/sh
# Make an environment with lmms-eval and mmrl, for the tests marked `lmms`: sh tests/lmms_install.sh FOLDER PACKAGE
# It sees the packages of .venv (`make .venv/mmrl`), so that only what lmms-eval adds is installed: about 0.5 GB.
set -eu
folder=$1 package=$2 root=$(cd "$(dirname "$0")/.." && pwd)
shared=$("${MMRL_PYTHON:-$root/.venv/bin/python}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
python3.11 -m venv "$folder"
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n%s\n' "$root" "$shared" > "$packages/mmrl_and_its_packages.pth"
# lmms-eval pins other versions of av and wandb; it imports filelock._api, which filelock 4 does not have.
limits=$(mktemp)
grep -v -E '^(av|wandb)==' "$root/constraints.txt" > "$limits"
"$folder/bin/pip" install --quiet --disable-pip-version-check --constraint "$limits" "$package" 'filelock<4'
rm "$limits"
"$folder/bin/python" -c 'import lmms_eval.evaluator, mmrl.build; print(mmrl.__version__)'
