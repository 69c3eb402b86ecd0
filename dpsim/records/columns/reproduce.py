"""The columns of a check of reproducibility."""

from __future__ import annotations

from dpsim.records.columns.column import Column
from dpsim.records.columns.sweep import ALGORITHM, DEVICES, OVERLAP, STRATEGY

LEAVES = Column(
    "leaves", "int64", "count", "The parts of a batch whose gradients are added in a fixed order; 0: plain."
)
ACCUMULATE = Column("accumulate", "int64", "count", "The micro-batches in which a device computes its share of a step.")
_CONFIGURATION = (
    Column("batch_norm", "category", "name", "The mode of batch norm."),
    LEAVES,
    DEVICES,
    Column("layout", "category", "name", "The devices as a layout such as `2x4`; empty on one node."),
    Column("fusion_threshold_bytes", "float64", "bytes", "The fusion threshold; it has no effect on one device."),
    ALGORITHM,
    OVERLAP,
    STRATEGY,
    ACCUMULATE,
)

POINTS = (
    *_CONFIGURATION,
    Column("promised", "boolean", "yes or no", "Whether dpsim promises the bits of one device here."),
    Column("digest", "string", "text", "The SHA-256 of parameters, optimizer state and running statistics at the end."),
    Column("losses_digest", "string", "text", "The SHA-256 of the losses of all steps."),
    Column("final_loss", "float64", "ratio", "The training loss of the last step."),
    Column("identical", "boolean", "yes or no", "Whether all ranks ended with the bits of one device."),
    Column(
        "first_difference.step", "Int64", "count", "The step, from 1, in which a tensor first differs from one device."
    ),
    Column("first_difference.tensor", "category", "name", "The first tensor that differs in that step."),
    Column("first_difference.tensors_differing", "Int64", "count", "The tensors that differ after that step."),
    Column("first_difference.tensors", "Int64", "count", "The tensors that were compared."),
    Column("first_difference.cause", "category", "name", "The cause of the difference."),
    Column("first_difference.evidence", "string", "text", "Why this is the cause."),
    Column(
        "first_difference.kept", "boolean", "yes or no", "Whether the values are known, and not only their digests."
    ),
    Column(
        "first_difference.element", "string", "text", "The index of the tensor's first differing element: `[3, 0]`."
    ),
    Column("first_difference.value", "float64", "ratio", "The value of that element."),
    Column("first_difference.reference_value", "float64", "ratio", "Its value on one device."),
    Column("first_difference.ulps", "Int64", "count", "How many floating-point numbers the two are apart."),
    Column("first_difference.relative", "float64", "ratio", "The relative difference of the two."),
    Column("first_difference.elements_differing", "Int64", "count", "The elements of the tensor that differ."),
    Column("first_difference.elements", "Int64", "count", "The elements of the tensor."),
    Column(
        "first_difference.max_ulps", "Int64", "count", "The most floating-point numbers that two elements are apart."
    ),
    Column(
        "first_difference.max_relative",
        "float64",
        "ratio",
        "The largest difference of two elements, over the largest number of the tensor.",
    ),
    Column("parameter_drift", "float64", "ratio", "The relative distance |w_n - w_1| / |w_1| after the last step."),
    Column("loss_drift", "float64", "ratio", "The relative difference of the last step's loss from one device's."),
    Column(
        "statistics_drift",
        "float64",
        "ratio",
        "The difference of a device's batch-norm means from the whole batch's, in standard deviations.",
    ),
    Column("predicted_parameter_drift", "float64", "ratio", "The prediction of parameter_drift."),
    Column("predicted_statistics_drift", "float64", "ratio", "The prediction of statistics_drift."),
)

SAMPLES = (
    *_CONFIGURATION,
    Column("step", "int64", "count", "The step of the training, from 1."),
    Column("loss", "float64", "ratio", "The mean training loss of the step."),
)
