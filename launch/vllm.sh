#!/usr/bin/env bash
# A server that draws rollouts for a run whose recipe says `rollout.engine: vllm`. It waits for the run's sft/model.
#
#   launch/vllm.sh RUN_DIR [PORT] [options of vLLM …]          PORT defaults to 8000
#
# Start one per replica, each on GPUs of its own, and name their addresses in rollout.urls. Only the machines of the run
# should reach the port: whoever does may load adapters. Environment:
#   VLLM_PYTHON  interpreter of a virtual environment with vLLM 0.32 or later (default python3); not the trainer's own
#   HOST         address to listen at (default 127.0.0.1; 0.0.0.0 for other nodes)
set -euo pipefail

if [[ $# -lt 1 || "$1" == -* ]]; then
    echo "usage: $0 RUN_DIR [PORT] [options of vLLM …]" >&2
    exit 2
fi
run_dir="$1"
shift
port=8000
if [[ $# -gt 0 && "$1" =~ ^[0-9]+$ ]]; then
    port="$1"
    shift
fi
python="${VLLM_PYTHON:-python3}"

model="$run_dir/sft/model"
[[ -f "$model/config.json" ]] || echo "[vllm] waiting for $model" >&2
until [[ -f "$model/config.json" && -f "$run_dir/recipe.yaml" ]]; do sleep 2; done

# dtype, the longest text, and the rank rounded up to one that vLLM has
facts="$("$python" - "$run_dir/recipe.yaml" <<'END'
import sys
import yaml

recipe = yaml.safe_load(open(sys.argv[1], encoding="utf-8"))
model, rank = recipe["model"], recipe[recipe["aligner"]]["lora"]["rank"]
ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)
length = model["max_prompt_tokens"] + model["max_response_tokens"]
print(model["dtype"], length, next(each for each in ranks if each >= rank))
END
)"
read -r dtype length rank <<<"$facts"

# No usage reports; adapters by request; log-probabilities after the temperature; no sampling defaults of the checkpoint.
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --host "${HOST:-127.0.0.1}" --port "$port" \
    --dtype "$dtype" --max-model-len "$length" --enable-lora --max-lora-rank "$rank" --max-loras 2 \
    --logprobs-mode processed_logprobs --generation-config vllm "$@"
