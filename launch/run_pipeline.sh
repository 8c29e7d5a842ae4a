#!/usr/bin/env bash
# Every stage of a recipe in order, the trained ones through `private-rlhf launch`. Complete stages are skipped and an
# interrupted one resumes, so starting it again is safe. SIGINT and SIGTERM end the stage that runs, and then this.
#
#   launch/run_pipeline.sh CONFIG [RUN_DIR] [section.key=value …]
#
# RUN_DIR defaults to runs/ and the recipe's file name. Environment:
#   ACCELERATE_CONFIG  where it runs: a file of this folder (default launch/cpu2.yaml)
#   ACCELERATE_ARGS    further options of `accelerate launch`, e.g. "--num_processes 8"
#   LAUNCH             in place of `private-rlhf launch`, e.g. "srun … launch/node.sh" on several nodes
#   PYTHON             interpreter (default .venv/bin/python where that exists, else python3)
set -euo pipefail

if [[ $# -lt 1 || "$1" == -* ]]; then
    echo "usage: $0 CONFIG [RUN_DIR] [section.key=value …]" >&2
    exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
config="$1"
shift
run_dir="runs/$(basename "$config" .yaml)"
if [[ $# -gt 0 && "$1" != -* && "$1" != *=* ]]; then
    run_dir="$1"
    shift
fi

python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
fi
accelerate_config="${ACCELERATE_CONFIG:-$root/launch/cpu2.yaml}"
if [[ ! -f "$accelerate_config" ]]; then
    echo "$0: ACCELERATE_CONFIG $accelerate_config does not exist: name a file such as launch/ddp.yaml" >&2
    exit 2
fi
read -r -a accelerate_args <<<"${ACCELERATE_ARGS:-}"

echo "[run_pipeline] $config -> $run_dir, on $accelerate_config" >&2
overrides=()
for argument in "$@"; do
    [[ "$argument" == -* || "$argument" != *=* ]] || overrides+=("$argument")
done
stages="$("$python" -m private_rlhf.cli stages --config "$config" ${overrides[@]+"${overrides[@]}"})"
launch=("$python" -m private_rlhf.cli launch)
[[ -z "${LAUNCH:-}" ]] || read -r -a launch <<<"$LAUNCH"
export PYTHON="$python"

set -m  # a stage is a process group of its own, so that each signal reaches it once, from here
signal="" child=""
for name in INT TERM; do
    trap "signal=$name; kill -$name \"\$child\" 2>/dev/null || true" "$name"
done
while read -r stage how; do
    starter=("$python" -m)
    if [[ "$how" == launched ]]; then
        starter=("${launch[@]}" --config_file "$accelerate_config" ${accelerate_args[@]+"${accelerate_args[@]}"} -m)
    fi
    "${starter[@]}" "private_rlhf.stages.$stage" --config "$config" --run-dir "$run_dir" "$@" </dev/null &
    child=$!
    code=0
    wait "$child" 2>/dev/null || code=$?
    while kill -0 "$child" 2>/dev/null; do  # a signal has ended the wait
        code=0
        wait "$child" 2>/dev/null || code=$?
    done
    if [[ -n "$signal" ]]; then
        echo "[run_pipeline] $stage was stopped by SIG$signal: run the same command again to resume" >&2
        exit $((code > 0 ? code : 130))
    fi
    [[ "$code" -eq 0 ]] || exit "$code"
done <<<"$stages"
