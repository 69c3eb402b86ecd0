"""The columns of the result of a training."""

from __future__ import annotations

from dpsim.columns import column, columns_of
from dpsim.records.columns.reproduce import ACCUMULATE, LEAVES
from dpsim.records.columns.sweep import SETTING
from dpsim.records.train import TrainResult

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
    column("batch_norm", "name", "The mode of batch norm; missing in earlier files where it was not given."),
    column("label_smoothing", "ratio", "The share of each target that is spread over all classes."),
    column("optimizer.kind", "name", "The optimizer; missing in files of earlier versions."),
    column("optimizer.learning_rate", "ratio", "Its learning rate."),
    column("optimizer.momentum", "ratio", "The momentum of SGD and LARS."),
    column("optimizer.weight_decay", "ratio", "Its weight decay."),
    column("rate_schedule.decay.kind", "name", "How the learning rate changes over time."),
    column("rate_schedule.warmup_epochs", "count", "The epochs in which the learning rate rises first.", "float64"),
    SETTING["devices"],
)

POINTS = (*_TRAINING, *columns_of(TrainResult).values())

SAMPLES = (
    *_TRAINING,
    column("step", "count", "The step of the training, from 1."),
    column("loss", "ratio", "The mean training loss of the step."),
)
