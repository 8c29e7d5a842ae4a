"""Stand-ins for `srun` and `scontrol`: the nodes of a job are processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

SRUN = """#!/usr/bin/env bash
# Runs the program once for each node; one that fails, or a signal, ends all.
echo "srun $*" >> "$SLURM_LOG"
while [[ "$1" == --* ]]; do
    [[ "$1" != --nodes=* ]] || nodes="${1#--nodes=}"
    shift
done
pids=() code=0
for ((id = 0; id < nodes; id++)); do
    SLURM_NODEID=$id setsid "$@" &
    pids+=($!)
done
end() { for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done; }
trap 'code=143; end' TERM
running=("${pids[@]}")
while [[ ${#running[@]} -gt 0 ]]; do
    still=()
    for pid in "${running[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then still+=("$pid"); continue; fi
        status=0; wait "$pid" 2>/dev/null || status=$?
        if [[ "$status" -ne 0 && "$code" -eq 0 ]]; then code=$status; end; fi
    done
    running=(${still[@]+"${still[@]}"})
    sleep 0.05
done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) [[ "$2" == hostnames ]] && tr , '\\n' <<<"$3" || echo "JobState=$SLURM_STATE" ;;
    *) echo "scontrol $*" >> "$SLURM_LOG" ;;
esac
"""


def job(folder: Path, nodes: int, gpus: int = 1) -> dict[str, str]:
    """The environment of a job's first node; what it asks of Slurm goes to `folder`/slurm.log."""
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    hosts = ",".join(f"node{number}" for number in range(nodes))
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_GPUS_ON_NODE": str(gpus),
        "SLURM_STATE": "RUNNING",
        "SLURM_LOG": str(folder / "slurm.log"),
        "SLURM_TMPDIR": str(folder / "local"),
    }
