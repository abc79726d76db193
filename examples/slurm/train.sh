#!/bin/bash
# A training that goes on after its time limit, a preemption and a lost node until it is done; here on the CPU:
#   sbatch examples/slurm/train.sh
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 train.sh train.yaml --trainer.accelerator gpu
# The configuration has a ModelCheckpoint with `dirpath: checkpoints`, `save_last: true` and `save_on_exception: true`.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch
CONFIG=$(realpath "${1:-configs/vit_elastic.yaml}")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # classes that the configuration names are where the job was submitted
mkdir -p "runs/$SLURM_JOB_ID" && cd "runs/$SLURM_JOB_ID" || exit  # the job keeps its number when it is requeued
NEWEST=$(ls -td hpc_ckpt_*.ckpt checkpoints/last.ckpt 2>/dev/null | head -n 1)
srun lightning-hybrid fit --config "$CONFIG" --trainer.num_nodes "$SLURM_NNODES" \
    --trainer.devices "$SLURM_NTASKS_PER_NODE" "${@:2}" ${NEWEST:+--ckpt_path "$NEWEST"}
STATUS=$?
# SIGUSR1 while processes were starting ends them; SIGTERM of a preemption has them save, and end as if all were done.
if [ $STATUS = 138 ] || scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $STATUS
