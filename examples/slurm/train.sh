#!/bin/bash
# A training job that resumes after its time limit, a preemption or a lost node. Submit it for CPUs or for GPUs:
#   sbatch examples/slurm/train.sh
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 train.sh train.yaml --trainer.accelerator gpu
# The configuration needs ModelCheckpoint with `dirpath: checkpoints`, `save_last: true` and `save_on_exception: true`.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not get it from sbatch
CONFIG=$(realpath "${1:-configs/vit_elastic.yaml}")
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # for classes in the folder where you submit the job
mkdir -p "runs/$SLURM_JOB_ID" && cd "runs/$SLURM_JOB_ID" || exit  # a requeued job keeps its ID
NEWEST=$(ls -td hpc_ckpt_*.ckpt checkpoints/last.ckpt 2>/dev/null | head -n 1)
srun lightning-hybrid fit --config "$CONFIG" --trainer.num_nodes "$SLURM_NNODES" \
    --trainer.devices "$SLURM_NTASKS_PER_NODE" "${@:2}" ${NEWEST:+--ckpt_path "$NEWEST"}
STATUS=$?
# SIGUSR1 ends processes that are still starting. After the SIGTERM of a preemption, processes save a checkpoint and
# exit as if training were complete. Requeue the job in both cases.
if [ $STATUS = 138 ] || scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $STATUS
