"""The columns of the result of a training."""

from __future__ import annotations

from dpsim.columns import column
from dpsim.records.columns.reproduce import ACCUMULATE, LEAVES
from dpsim.records.columns.sweep import SETTING

_TRAINING = (
    column("model", "name", "The model that was trained."),
    column("dataset", "name", "The data set."),
    SETTING["global_batch"],
    column("seed", "count", "The seed of initialisation and shuffling."),
    SETTING["network"],
    SETTING["algorithm"],
    SETTING["fusion_rule"],
    SETTING["overlap"],
    LEAVES,
    SETTING["strategy"],
    SETTING["compute_dtype"],
    SETTING["layout"],
    SETTING["fusion_threshold_bytes"],
    column("cycle_s", "s", "Horovod's cycle."),
    ACCUMULATE,
    column("wire_dtype", "name", "The number format of gradients in messages; missing: the tensors' own."),
    column("batch_norm", "name", "The mode of batch norm, where it was given."),
    column("label_smoothing", "ratio", "The share of each target that is spread over all classes."),
    column("optimizer.kind", "name", "The optimizer; missing in files of earlier versions."),
    column("optimizer.learning_rate", "ratio", "Its learning rate."),
    column("optimizer.momentum", "ratio", "The momentum of SGD and LARS."),
    column("optimizer.weight_decay", "ratio", "Its weight decay."),
    column("rate_schedule.decay.kind", "name", "How the learning rate changes over time."),
    column("rate_schedule.warmup_epochs", "count", "The epochs in which the learning rate rises first.", "float64"),
    SETTING["devices"],
)

POINTS = (
    *_TRAINING,
    column("steps", "count", "The steps that were trained, those before a resumed run included."),
    column("test_accuracy", "ratio", "The share of the test samples that are classified correctly at the end."),
    column("test_loss", "ratio", "The mean cross-entropy of the test samples at the end, in nats; NaN: unknown."),
    column("final_loss", "ratio", "The training loss of the last step."),
    column("images_per_s", "1/s", "The samples of a step over step_s, so samples per second."),
    column("step_s", "s", "The median time of a step with a whole batch, on the slowest rank; 0 where there is none."),
    column("exposed_communication_s", "s", "Its communication that was not hidden by computation: the median."),
    column("digest", "text", "The SHA-256 of the trained state."),
    column("first_step", "count", "The steps that a resumed run took over; 0 for a run from the beginning."),
    column("checkpoint_failure", "text", "Why the last checkpoint could not be written; empty if it was."),
    column(
        "optimizer_state_bytes",
        "bytes",
        "The memory of optimizer state on the device with the most; 0: unknown.",
        "int64",
    ),
    column("gpus", "count", "The GPUs that took part, which several ranks may share; 0 on the CPU."),
    column(
        "gpu_path",
        "name",
        "How gradients got from GPU to GPU: by kernels in `peer memory`, by `nccl`, or through the `host` by MPI.",
    ),
    column("computed_on", "text", "With backend cuda: where gradients were computed and reduced."),
    column("libraries", "text", "With backend cuda: versions and settings that decide the digest's bits."),
)

SAMPLES = (
    *_TRAINING,
    column("step", "count", "The step of the training, from 1."),
    column("loss", "ratio", "The mean training loss of the step."),
)
