#!/usr/bin/env bash
# A recipe over a grid of epsilons and seeds, into runs/NAME-epsE-seedS, and a page that compares them with the first,
# runs/NAME-sweep.md, with its figure of J gain and win rate by epsilon, runs/NAME-sweep.svg.
# Finished runs are skipped, so a sweep can be stopped and started again.
#
#   launch/sweep_epsilon.sh CONFIG [section.key=value …]
#
# Environment: EPSILONS (default "0.5 1 2"), SEEDS (default "0 1 2"), PYTHON. The non-private arm is `.inf`; it needs
# data.public_labels=true and is for labels that are declared public only.
#
# Every arm trains its policy, also on a reward that may be a coin: they are there to be compared.
# The releases of one sweep share the recipe's key: all of them together cost the largest epsilon, per label.
set -euo pipefail

if [[ $# -lt 1 || "$1" == -* ]]; then
    echo "usage: $0 CONFIG [section.key=value …]" >&2
    exit 2
fi
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
config="$1"
shift
name="$(basename "$config" .yaml)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
    python="$root/.venv/bin/python"
    [[ -x "$python" ]] || python=python3
fi
read -r -a epsilons <<<"${EPSILONS:-0.5 1 2}"
read -r -a seeds <<<"${SEEDS:-0 1 2}"

run_dirs=()
for epsilon in "${epsilons[@]}"; do
    for seed in "${seeds[@]}"; do
        run_dir="runs/$name-eps${epsilon#.}-seed$seed"
        [[ "$epsilon" == .inf || "$epsilon" != .* ]] || run_dir="runs/$name-eps0$epsilon-seed$seed"
        "$python" -m private_rlhf.cli run --config "$config" --run-dir "$run_dir" \
            --accept-reward "$@" "privatize.epsilon=$epsilon" "seed=$seed"
        run_dirs+=("$run_dir")
    done
done
if [[ ${#run_dirs[@]} -gt 1 ]]; then
    "$python" -m private_rlhf.cli compare --output "runs/$name-sweep.md" "${run_dirs[@]}"
fi
