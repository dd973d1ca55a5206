#!/usr/bin/env sh
# What a user gets from `pip install` without any extra, from the built wheel and away from the checkout: every
# command's help, a check, a build, a training of two steps, an evaluation with settings side by side, a report.
# Usage: sh tests/plain_install.sh FOLDER
set -eu
home=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
env=$(cd "$1" && pwd)
[ -x "$env/bin/python" ] || python3 -m venv "$env"
# What is imported is compiled then, once: pip would compile every file of torch and transformers.
unset PYTHONDONTWRITEBYTECODE
pip() { "$env/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --constraint "$home/constraints.txt" build
rm -rf "$env/dist" "$env/work"
"$env/bin/python" -m build --outdir "$env/dist" "$home" > "$env/build.log"  # the sdist, and the wheel from it
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ -x "$home/.venv/bin/python" ]; then  # which pip has filled from the same constraints
    (cd "$home" && .venv/bin/python -m tests.support.link_packages "$env"/dist/*.whl "$site")
fi
pip install --no-compile --constraint "$home/constraints.txt" "$env"/dist/*.whl
pip check
pip install --force-reinstall --no-deps "$env"/dist/*.whl

mkdir "$env/work"
cd "$env/work"
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
mmrl() { "$env/bin/mmrl" "$@"; }
# In one process, because each would import torch anew.
"$env/bin/python" - train evaluate generate chat check doctor estimate-memory report build compare compare-answers pareto-front data env export keys list push watch > help.txt <<'PY'
import sys
from mmrl.cli import main
for command in sys.argv[1:]:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    else:
        raise AssertionError(command)
PY
test "$(grep -c '^usage: ' help.txt)" = 19
for number in 1 2 3 4 5 6 7 8; do
    echo "{\"question\": \"What is $number and $number?\", \"answer\": \"$((number + number))\"}"
done > rows.jsonl
cat > run.yaml <<'YAML'
include: [methods/grpo/grpo.yaml]
policy: {name: vision.tokens, model: model, dtype: float32}
data: {name: vision.visual_qa, path: rows.jsonl}
rewards: [vision.short_answer]
rollout: {num_prompts: 2, num_generations: 2, engine: [{name: vision.generate, max_completion_length: 4}]}
max_steps: 2
output_dir: run
YAML
cat > evaluation.yaml <<'YAML'
policy: {name: vision.tokens, model: run/checkpoint-2/model, dtype: float32}
evaluation:
  data: {name: vision.visual_qa, path: rows.jsonl}
  engine: [{name: vision.generate, max_completion_length: 4, temperature: 0.0}]
  rewards: [vision.short_answer]
settings:
  whole: {}
  pruned: {policy.transform: [compression.yopo25]}
output_dir: evaluation
YAML
mmrl build build/tiny_qwen2_5_vl.yaml output=model
mmrl check run.yaml methods/grpo/dapo.yaml
mmrl data check rows.jsonl
mmrl train run.yaml
mmrl check evaluation.yaml
mmrl evaluate evaluation.yaml
mmrl report run
mmrl list > pieces.txt
test -s run/report.html
test -s evaluation/evaluation.json || ls evaluation
echo "plain install: every command ran"
