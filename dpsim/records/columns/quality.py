"""The columns of a study of training quality."""

from __future__ import annotations

from dpsim.columns import column

_MODEL = column("model", "name", "The model that was trained.")
_DATASET = column("dataset", "name", "The data set, with its settings.")
_GLOBAL_BATCH = column("global_batch", "count", "The samples of a step.")
_TARGET_LOSS = column("target_loss", "ratio", "The loss at which training ends; NaN where it has no target.")

POINTS = (
    column(
        "measure",
        "name",
        "What was predicted: `gap` of batch norm, in the log of the training loss; RMS `divergence` of a statistic; or "
        "`steps_to_target`.",
    ),
    _MODEL,
    _DATASET,
    _GLOBAL_BATCH,
    column("local_batch", "count", "The samples of a device; missing for steps to a target.", "Int64"),
    _TARGET_LOSS,
    column("layer", "name", "The batch norm whose statistic diverges; missing for other measures."),
    column("statistic", "name", "Which of its statistics, mean or variance; missing for other measures."),
    column("held_out", "yes or no", "Whether it was predicted before it was measured, not fitted."),
    column("predicted", "ratio", "The prediction, or the fitted curve; NaN where there is none."),
    column("measured", "ratio", "What was measured: the mean gap, the RMS, or the median number of steps."),
    column("error", "ratio", "The relative error: predicted / measured - 1."),
)

SAMPLES = (
    _MODEL,
    _DATASET,
    _GLOBAL_BATCH,
    column("local_batch", "count", "The samples of a leaf, which stands for a device."),
    column("batch_norm", "name", "The mode of batch norm."),
    column("learning_rate", "ratio", "The learning rate."),
    column("momentum", "ratio", "The momentum."),
    column("seed", "count", "The seed of the training."),
    column("steps", "count", "The most steps that it may take."),
    _TARGET_LOSS,
    column("final_loss", "ratio", "The mean training loss of the last epoch, with batch statistics."),
    column("training_set_loss", "ratio", "The loss on the training set at the end, with running statistics."),
    column("test_loss", "ratio", "The loss on the test set at the end."),
    column("test_accuracy", "ratio", "The accuracy on the test set at the end."),
)
