#!/usr/bin/env bash
# Example, not run: head, workers and a run in one Slurm job. The nodes share a file system with the checkout, its .venv
# and FED_RLHF_HOME.
#
#   sbatch infra/ray/slurm.sh summarization/tldr
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-task=1
#SBATCH --time=24:00:00
set -euo pipefail

recipe=${1:?name a recipe}
port=6379
export PATH="$PWD/.venv/bin:$PATH" RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$PWD/.state/ray-token-$SLURM_JOB_ID"
export RAY_USAGE_STATS_ENABLED=0
mkdir -p .state
(umask 077 && openssl rand -hex 32 > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
host=$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')
address=$host:$port
PREFECT_SERVER_API_AUTH_STRING="run:$(openssl rand -hex 32)"
export PREFECT_SERVER_API_AUTH_STRING PREFECT_API_AUTH_STRING=$PREFECT_SERVER_API_AUTH_STRING
export PREFECT_API_URL=http://$host:4200/api

# The Prefect server, to which tasks of all nodes report, listens in the network of the cluster, with a password.
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" prefect server start --host "$host" --port 4200 &
# Each `ray start --block` is a step of the job, and ends with it.
srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    ray start --head --block --port=$port --num-cpus="$SLURM_CPUS_PER_TASK" --include-dashboard=false &
sleep 20
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        ray start --block --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" &
done
sleep 20

srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" \
    fed-rlhf run "$recipe" runtime.task_runner=ray runtime.ray_address="$address"
