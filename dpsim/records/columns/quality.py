"""The columns of a study of training quality."""

from __future__ import annotations

from dpsim.records.columns.column import Column

_MODEL = Column("model", "category", "name", "The model that was trained.")
_DATASET = Column("dataset", "category", "name", "The data set, with its settings.")
_GLOBAL_BATCH = Column("global_batch", "int64", "count", "The samples of a step.")
_TARGET_LOSS = Column("target_loss", "float64", "ratio", "The loss at which training ends; NaN where it has no target.")

POINTS = (
    Column(
        "measure",
        "category",
        "name",
        "What was predicted: `gap` of batch norm, in the log of the training loss; RMS `divergence` of a statistic; or "
        "`steps_to_target`.",
    ),
    _MODEL,
    _DATASET,
    _GLOBAL_BATCH,
    Column("local_batch", "Int64", "count", "The samples of a device; missing for steps to a target."),
    _TARGET_LOSS,
    Column("layer", "category", "name", "The batch norm whose statistic diverges; missing for other measures."),
    Column("statistic", "category", "name", "Which of its statistics, mean or variance; missing for other measures."),
    Column("held_out", "boolean", "yes or no", "Whether it was predicted before it was measured, not fitted."),
    Column("predicted", "float64", "ratio", "The prediction, or the fitted curve; NaN where there is none."),
    Column("measured", "float64", "ratio", "What was measured: the mean gap, the RMS, or the median number of steps."),
    Column("error", "float64", "ratio", "The relative error: predicted / measured - 1."),
)

SAMPLES = (
    _MODEL,
    _DATASET,
    _GLOBAL_BATCH,
    Column("local_batch", "int64", "count", "The samples of a leaf, which stands for a device."),
    Column("batch_norm", "category", "name", "The mode of batch norm."),
    Column("learning_rate", "float64", "ratio", "The learning rate."),
    Column("momentum", "float64", "ratio", "The momentum."),
    Column("seed", "int64", "count", "The seed of the training."),
    Column("steps", "int64", "count", "The most steps that it may take."),
    _TARGET_LOSS,
    Column("final_loss", "float64", "ratio", "The mean training loss of the last epoch, with batch statistics."),
    Column(
        "training_set_loss", "float64", "ratio", "The loss on the training set at the end, with running statistics."
    ),
    Column("test_loss", "float64", "ratio", "The loss on the test set at the end."),
    Column("test_accuracy", "float64", "ratio", "The accuracy on the test set at the end."),
)
