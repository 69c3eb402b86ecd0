"""The predicted divergence of local batch-norm statistics from the global batch's. Loads no MPI."""

from __future__ import annotations

from collections.abc import Mapping

from dpsim.predict.statistics_divergence import STATISTICS, Spread, divergence, independent_rows
from dpsim.records.quality import DivergencePoint, DivergenceStudy

_Scale = Mapping[str, Mapping[str, Mapping[str, float]]]


def predicted(study: DivergenceStudy, spreads: Mapping[str, Spread], scales: _Scale) -> tuple[DivergencePoint, ...]:
    """The divergence at every local batch, norm and statistic.

    The spread is that of a pass in which all samples were normalised together. With local statistics in the norms
    before it, a norm's samples spread less: the prediction is scaled by what was measured over what is predicted at one
    small local batch, ``scales``.
    """
    points = []
    for b in study.local_batches:
        for name, each in spreads.items():
            unscaled, null = (f(each, b, study.global_batch) for f in (divergence, independent_rows))
            at_scale = divergence(each, study.scaled_at, study.global_batch)
            for statistic in STATISTICS:
                actual = scales[str(study.scaled_at)][name][statistic]
                scale = actual / at_scale[statistic] if at_scale[statistic] > 0 else 1.0
                points.append(
                    DivergencePoint(
                        layer=name,
                        statistic=statistic,
                        local_batch=b,
                        predicted=scale * unscaled[statistic],
                        unscaled=unscaled[statistic],
                        independent_rows=null[statistic],
                    )
                )
    return tuple(points)
