"""The columns of a check of reproducibility."""

from __future__ import annotations

from dpsim.columns import column, nested
from dpsim.records.columns.sweep import SETTING
from dpsim.records.reproduce import Difference

LEAVES = column("leaves", "count", "The parts of a batch whose gradients are added in a fixed order; 0: plain.")
ACCUMULATE = column("accumulate", "count", "The micro-batches in which a device computes its share of a step.")
CONFIGURATION = (
    column("batch_norm", "name", "The mode of batch norm."),
    LEAVES,
    SETTING["devices"],
    column("layout", "name", "The devices as a layout such as `2x4`; empty on one node."),
    column("fusion_threshold_bytes", "bytes", "The fusion threshold; it has no effect on one device."),
    SETTING["algorithm"],
    SETTING["overlap"],
    SETTING["strategy"],
    ACCUMULATE,
)

POINTS = (
    *CONFIGURATION,
    column("promised", "yes or no", "Whether dpsim promises the bits of one device here."),
    column("digest", "text", "The SHA-256 of parameters, optimizer state and running statistics at the end."),
    column("losses_digest", "text", "The SHA-256 of the losses of all steps."),
    column("final_loss", "ratio", "The training loss of the last step."),
    column("identical", "yes or no", "Whether all ranks ended with the bits of one device."),
    *nested(Difference, "first_difference"),
    column("parameter_drift", "ratio", "The relative distance |w_n - w_1| / |w_1| after the last step."),
    column("loss_drift", "ratio", "The relative difference of the last step's loss from one device's."),
    column(
        "statistics_drift",
        "ratio",
        "The difference of a device's batch-norm means from the whole batch's, in standard deviations.",
    ),
    column("predicted_parameter_drift", "ratio", "The prediction of parameter_drift."),
    column("predicted_statistics_drift", "ratio", "The prediction of statistics_drift."),
)

SAMPLES = (
    *CONFIGURATION,
    column("step", "count", "The step of the training, from 1."),
    column("loss", "ratio", "The mean training loss of the step."),
)
