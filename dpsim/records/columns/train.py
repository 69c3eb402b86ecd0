"""The columns of the result of a training."""

from __future__ import annotations

from dpsim.records.columns.column import Column
from dpsim.records.columns.reproduce import ACCUMULATE, LEAVES
from dpsim.records.columns.sweep import (
    ALGORITHM,
    COMPUTE_DTYPE,
    DEVICES,
    FUSION_RULE,
    FUSION_THRESHOLD,
    GLOBAL_BATCH,
    LAYOUT,
    NETWORK,
    OVERLAP,
    STRATEGY,
)

_TRAINING = (
    Column("model", "category", "name", "The model that was trained."),
    Column("dataset", "category", "name", "The data set."),
    GLOBAL_BATCH,
    Column("seed", "int64", "count", "The seed of initialisation and shuffling."),
    NETWORK,
    ALGORITHM,
    FUSION_RULE,
    OVERLAP,
    LEAVES,
    STRATEGY,
    COMPUTE_DTYPE,
    LAYOUT,
    FUSION_THRESHOLD,
    Column("cycle_s", "float64", "s", "Horovod's cycle."),
    ACCUMULATE,
    Column("wire_dtype", "category", "name", "The number format of gradients in messages; missing: the tensors' own."),
    Column("batch_norm", "category", "name", "The mode of batch norm, where it was given."),
    Column("label_smoothing", "float64", "ratio", "The share of each target that is spread over all classes."),
    Column("optimizer.kind", "category", "name", "The optimizer; missing in files of earlier versions."),
    Column("optimizer.learning_rate", "float64", "ratio", "Its learning rate."),
    Column("optimizer.momentum", "float64", "ratio", "The momentum of SGD and LARS."),
    Column("optimizer.weight_decay", "float64", "ratio", "Its weight decay."),
    Column("rate_schedule.decay.kind", "category", "name", "How the learning rate changes over time."),
    Column("rate_schedule.warmup_epochs", "float64", "count", "The epochs in which the learning rate rises first."),
    DEVICES,
)

POINTS = (
    *_TRAINING,
    Column("steps", "int64", "count", "The steps that were trained, those before a resumed run included."),
    Column(
        "test_accuracy", "float64", "ratio", "The share of the test samples that are classified correctly at the end."
    ),
    Column(
        "test_loss", "float64", "ratio", "The mean cross-entropy of the test samples at the end, in nats; NaN: unknown."
    ),
    Column("final_loss", "float64", "ratio", "The training loss of the last step."),
    Column("images_per_s", "float64", "1/s", "The samples of a step over step_s, so samples per second."),
    Column(
        "step_s",
        "float64",
        "s",
        "The median time of a step with a whole batch, on the slowest rank; 0 where there is none.",
    ),
    Column(
        "exposed_communication_s", "float64", "s", "Its communication that was not hidden by computation: the median."
    ),
    Column("digest", "string", "text", "The SHA-256 of the trained state."),
    Column("first_step", "int64", "count", "The steps that a resumed run took over; 0 for a run from the beginning."),
    Column("checkpoint_failure", "string", "text", "Why the last checkpoint could not be written; empty if it was."),
    Column(
        "optimizer_state_bytes",
        "int64",
        "bytes",
        "The memory of optimizer state on the device with the most; 0: unknown.",
    ),
    Column("gpus", "int64", "count", "The GPUs that took part, which several ranks may share; 0 on the CPU."),
    Column(
        "gpu_path",
        "category",
        "name",
        "How gradients got from GPU to GPU: by kernels in `peer memory`, by `nccl`, or through the `host` by MPI.",
    ),
    Column("computed_on", "string", "text", "With backend cuda: where gradients were computed and reduced."),
    Column("libraries", "string", "text", "With backend cuda: versions and settings that decide the digest's bits."),
)

SAMPLES = (
    *_TRAINING,
    Column("step", "int64", "count", "The step of the training, from 1."),
    Column("loss", "float64", "ratio", "The mean training loss of the step."),
)
