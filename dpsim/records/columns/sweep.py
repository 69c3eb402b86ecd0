"""The columns of a sweep: over the fusion threshold, or over the number of devices."""

from __future__ import annotations

from dpsim.records.columns.column import Column

DEVICES = Column("devices", "int64", "count", "The number of devices; each is one rank.")
GLOBAL_BATCH = Column("global_batch", "int64", "count", "The samples of one step, over all devices.")
FUSION_RULE = Column("fusion_rule", "category", "name", "The rule that forms buckets.")
FUSION_THRESHOLD = Column(
    "fusion_threshold_bytes",
    "float64",
    "bytes",
    "The fusion threshold: 0 is one bucket per tensor, inf is one per step. One device has none (NaN).",
)
NETWORK = Column("network", "category", "name", "`node`, the machine as it is, or an emulated link `paced:...`.")
_EMULATED_COMPUTE = Column(
    "emulated_compute", "boolean", "yes or no", "Whether computation was emulated: ranks waited for profiled times."
)
ALGORITHM = Column("algorithm", "category", "name", "The allreduce algorithm.")
OVERLAP = Column("overlap", "category", "name", "How communication runs beside backward; `off` is not at all.")
LAYOUT = Column("layout", "category", "name", "The devices as a layout: `2x4` is 2 nodes with 4 each, `8` is 8 on one.")

_RUNTIME = Column(
    "runtime",
    "category",
    "name",
    "Who trained: `dpsim`, or PyTorch's DDP by gloo (`torch-ddp-gloo`), by a hook over MPI (`torch-ddp-mpi`) or by "
    "NCCL (`torch-ddp-nccl`).",
)
_MODEL = Column("model", "category", "name", "The model that was trained.")
STRATEGY = Column("strategy", "category", "name", "The strategy: plain data parallelism, or ZeRO-1.")
COMPUTE_DTYPE = Column(
    "compute_dtype", "category", "name", "What operands of products and convolutions are rounded to."
)
_TRAINING = (
    Column("accumulate", "int64", "count", "The micro-batches of a step on each device."),
    Column("batch_norm", "category", "name", "Whose statistics batch norm uses: those of each device, leaf, or all."),
    Column("leaves", "int64", "count", "The leaves of a global batch in reproducible training; 0 is without leaves."),
    STRATEGY,
    Column("wire_dtype", "category", "name", "What gradients are sent as; missing where it is their own data type."),
    COMPUTE_DTYPE,
)
TRAINING = tuple(column.name for column in _TRAINING)
_SETTING = (
    DEVICES,
    LAYOUT,
    GLOBAL_BATCH,
    FUSION_RULE,
    FUSION_THRESHOLD,
    NETWORK,
    _EMULATED_COMPUTE,
    ALGORITHM,
    OVERLAP,
    _MODEL,
    *_TRAINING,
    _RUNTIME,
)
_OF_RUN = (
    *_SETTING,
    Column("repeat", "int64", "count", "0, or 1 for the second run of a setting that was run twice to see the noise."),
)

POINTS = (
    DEVICES,
    LAYOUT,
    GLOBAL_BATCH,
    Column("local_batch", "float64", "count", "The samples of one step on one device, on average."),
    FUSION_RULE,
    FUSION_THRESHOLD,
    Column("buckets", "int64", "count", "The buckets (allreduces) of a step, as the run formed them."),
    NETWORK,
    _EMULATED_COMPUTE,
    Column("emulated_network", "boolean", "yes or no", "Whether the network was emulated."),
    Column(
        "measured_step_s",
        "float64",
        "s",
        "The measured time of a step: the median over all samples. Where the machine's speed changed, they are first "
        "scaled to its mean speed.",
    ),
    Column("measured_low_s", "float64", "s", "The lower end of its 95 % bootstrap interval."),
    Column("measured_high_s", "float64", "s", "The upper end of its 95 % bootstrap interval."),
    Column("predicted_step_s", "float64", "s", "The time of a step that was predicted before the measurement."),
    Column("predicted_low_s", "float64", "s", "The lower end of the predicted interval, or of an assumed band."),
    Column("predicted_high_s", "float64", "s", "The upper end of the predicted interval, or of an assumed band."),
    Column(
        "exposed_communication_s",
        "float64",
        "s",
        "Measured time of a step in which communication is not hidden by computation: the median over all samples.",
    ),
    Column("predicted_exposed_communication_s", "float64", "s", "The same as it was predicted."),
    Column("error", "float64", "ratio", "The error of the prediction: predicted_step_s / measured_step_s - 1."),
    Column(
        "noise",
        "float64",
        "ratio",
        "The relative difference of two runs of one setting, for this network and number of devices; NaN if none ran.",
    ),
    Column("calibrated_on", "string", "text", "The processor, network and time of the calibration."),
    Column("extrapolated", "boolean", "yes or no", "Whether the prediction lies outside the range of the calibration."),
    ALGORITHM,
    OVERLAP,
    Column("samples", "int64", "count", "The measured steps, over all runs of the setting."),
    Column("repeat", "int64", "count", "How many runs of the setting are pooled here: 1, or 2 for a repeated one."),
    Column(
        "measured_speedup", "float64", "ratio", "Measured samples/s over those of one device; NaN if that is missing."
    ),
    Column("predicted_speedup", "float64", "ratio", "Predicted samples/s over those of one device."),
    Column("efficiency", "float64", "ratio", "The scaling efficiency: measured_speedup / devices."),
    Column("is_best_measured", "boolean", "yes or no", "Whether this point was the fastest of its group."),
    Column(
        "is_best_predicted", "boolean", "yes or no", "Whether this point was predicted to be the fastest of its group."
    ),
    Column(
        "scored",
        "boolean",
        "yes or no",
        "Whether the point is scored: it has the overlap that the sweep chose. The others show what overlap does.",
    ),
    Column("predicted_buckets", "int64", "count", "The buckets of a step, as the model formed them."),
    Column("slow_samples", "float64", "ratio", "The share of the samples above 1.5 times the median."),
    Column(
        "null_step_s.*",
        "float64",
        "s",
        "The time of a step by a simple guess that the model has to beat, with the name of the guess after the dot.",
    ),
    Column("null_exposed_s.*", "float64", "s", "The exposed communication of a step by the same guess."),
    Column(
        "measured_drift",
        "float64",
        "ratio",
        "The relative distance |w_n - w_1| / |w_1| of the trained parameters from those on one device; NaN if not "
        "measured.",
    ),
    Column("predicted_drift", "float64", "ratio", "The same as it was predicted."),
    Column(
        "measured_statistics_drift",
        "float64",
        "ratio",
        "The difference of a device's batch-norm means from the whole batch's, in standard deviations.",
    ),
    Column("predicted_statistics_drift", "float64", "ratio", "The same as it was predicted."),
    Column("digest", "string", "text", "The SHA-256 of the trained state; empty where none was trained."),
    Column(
        "predicted_at_run_speed_s",
        "float64",
        "s",
        "The prediction for the speeds that the machine had during the run (of DDP: by its forward passes); NaN where "
        "they were not observed.",
    ),
    Column(
        "error_at_equal_speed",
        "float64",
        "ratio",
        "The error at those speeds: the median over the samples, each against the prediction for its visit's speed.",
    ),
    _MODEL,
    *_TRAINING,
    Column("group", "category", "text", "The network and the other values that its settings share; only they compete."),
    Column(
        "memory_bytes",
        "float64",
        "bytes",
        "What the device with the most has allocated: parameters, gradients, optimizer state, activations; NaN if not "
        "known.",
    ),
    Column("predicted_memory_bytes", "float64", "bytes", "The same as it was predicted; NaN if not known."),
    Column(
        "deadline_lateness",
        "float64",
        "ratio",
        "Where computation is emulated, how late layers ended (median), relative to the step; else NaN.",
    ),
    Column(
        "free_cores",
        "float64",
        "ratio",
        "Where computation is emulated, the share of the cores' time in which no rank ran; else NaN.",
    ),
    Column(
        "interval_level",
        "float64",
        "ratio",
        "The probability with which the predicted interval is to hold the measured step; NaN for an assumed band.",
    ),
    Column(
        "predicted_communication_cost_s",
        "float64",
        "s",
        "The predicted step minus the one on a network where collectives take no time; NaN in earlier records.",
    ),
    _RUNTIME,
    Column(
        "dpsim_step_s",
        "float64",
        "s",
        "Where PyTorch's DDP trained, the step of dpsim's own runtime with the same plan, whose ranks waited for the "
        "profiled times instead of computing; NaN if not measured.",
    ),
    Column("dpsim_exposed_communication_s", "float64", "s", "Its exposed communication; NaN if not measured."),
)

SAMPLES = (
    *_OF_RUN,
    Column("round", "int64", "count", "The round of the interleaved run in which the step was measured, from 0."),
    Column("step", "int64", "count", "The number of the sample within its run, from 0."),
    Column("step_s", "float64", "s", "The time of the step on the slowest rank, as it was measured."),
    Column("exposed_communication_s", "float64", "s", "Its communication that was not hidden by computation."),
    Column("loss", "float64", "ratio", "The mean training loss of the step."),
    Column(
        "reference_s",
        "float64",
        "s",
        "The time of the reference computation in the same visit, on the slowest rank; NaN in earlier records.",
    ),
)

TIMELINE = (
    *_OF_RUN,
    Column("source", "category", "name", "`measured` or `predicted`."),
    Column("step", "int64", "count", "The step within the timeline, from 0."),
    Column("rank", "int64", "count", "The rank, from 0."),
    Column("lane", "category", "name", "`compute` or `communication`."),
    Column("operation", "category", "name", "What was done, such as `backward dense2` or `allreduce 3`."),
    Column("kind", "category", "name", "The kind of operation, such as `backward` or `allreduce`."),
    Column("start_s", "float64", "s", "When it began, on one clock for all ranks of the timeline."),
    Column("end_s", "float64", "s", "When it ended, on the same clock."),
    Column("size_bytes", "int64", "bytes", "The bytes of the message; 0 for computation."),
    Column("emulated_network", "boolean", "yes or no", "Whether the network was emulated."),
    Column("clock", "category", "name", "What read the times: `host`, or `device` for marks in the streams of a GPU."),
    Column("asked_s", "float64", "s", "When the host had asked the device for it; NaN on the host's clock."),
)
