#!/usr/bin/env bash
# One node's part of a stage: `private-rlhf launch` that knows the node's place. `slurm.sbatch` starts one on each node.
#
#   launch/node.sh OPTIONS OF private-rlhf launch …
#
# Environment:
#   NODES, SLURM_NODEID                  how many nodes share the stage, and which this is (0, 1, …; srun sets it)
#   MAIN_PROCESS_IP, MAIN_PROCESS_PORT   address of the first node, and a port that is free there
#   PYTHON                               interpreter (default python3)
set -euo pipefail

caches="${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/private-rlhf-${SLURM_JOB_ID:-$UID}"
mkdir -p "$caches"
export HF_DATASETS_CACHE="$caches/datasets" TRITON_CACHE_DIR="$caches/triton" TORCHINDUCTOR_CACHE_DIR="$caches/inductor"
exec "${PYTHON:-python3}" -m private_rlhf.cli launch --num_machines "$NODES" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT" "$@"
