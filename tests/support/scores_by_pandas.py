"""Skill, regret and the best simple guess of each network of a sweep, by pandas alone, without dpsim.

It reads ``results.json``, which says which of its points are compared with each other (``groups``) and with which
guesses (``guesses``), and ``blind.json`` (``predictions.json`` where nothing was predicted from the same minutes).
"""

import json
from itertools import accumulate, chain, islice, repeat

import numpy as np
import pandas as pd

SHORT_FORMS = {
    "=rows": lambda of: [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=True)],
    "=steps": lambda of: [*accumulate(of)],
    "=lists": lambda of: (lambda rest: [[*islice(rest, length)] for length in of[0]])(iter(of[1])),
    "=distinct": lambda of: [of[0][index] for index in of[1]],
    "=runs": lambda of: [*chain(*map(repeat, *of))],
    "=decimals": lambda of: [number / 10 ** of[0] for number in of[1]],
}


def unpacked(value):
    if isinstance(value, dict) and (kind := next(iter(value), None)) in SHORT_FORMS:
        return SHORT_FORMS[kind](unpacked(value[kind]))
    if isinstance(value, dict):
        return {name: unpacked(each) for name, each in value.items()}
    return [*map(unpacked, value)] if isinstance(value, list) else value


def read(path):
    """Return a record and its points as a table; ``key`` is the setting, without the number of its run."""
    record = unpacked(json.loads(path.read_text()))
    points = pd.json_normalize(record["points"])
    points["key"] = [json.dumps(point["setting"] | {"repeat": 0}) for point in record["points"]]
    return record, points


def counted(of, least=6):
    """Return the samples of a setting that count: the clean ones where these are enough."""
    marked, clean = of[of["clean"].notna()], of[of["clean"].eq(True)]
    return clean if len(clean) >= least else marked if len(marked) else of


def network_scores(folder):
    """Return the scores of each network and runtime."""
    blind = folder / "blind.json"
    predicted = read(blind if blind.exists() else folder / "predictions.json")[1].drop_duplicates("key")
    results, measured = read(folder / "results.json")
    measured["group"] = pd.Series({point: group for group, of in enumerate(results["groups"]) for point in of})
    unknown = [[None] * len(steps) for steps in measured["step_s"]]
    measured["clean"] = [mark or each for mark, each in zip(measured.get("clean", unknown), unknown, strict=True)]
    samples = measured.dropna(subset="group")[["key", "group", "step_s", "round", "clean"]]
    samples = samples.explode(["step_s", "round", "clean"]).astype({"step_s": float, "round": int})
    samples = pd.concat([counted(of) for _, of in samples.groupby("key")])
    timed = samples.groupby("key").agg(measured_s=("step_s", "median"), group=("group", "first"))
    points = predicted.set_index("key").join(timed, how="inner")
    several, scores = points[points["setting.plan.devices"] > 1], {}
    for place, of in several.groupby(["setting.network", "setting.runtime"]):
        model = (of["step_s"] / of["measured_s"] - 1).abs().median()
        guessed = of[[f"null_step_s.{name}" for name in results["guesses"]]].div(of["measured_s"], axis=0)
        null = (guessed - 1).abs().median(skipna=False).min()
        regrets = [regret(points[points["group"] == group], samples) for group in of["group"].unique()]
        scores[place] = {"median_abs_error": model, "null_median_abs_error": null, "skill": 1 - model / null}
        scores[place]["regret"] = max(regrets)
    return scores


def regret(points, samples, halves=200, seed=0):
    """Return the mean cost of the predicted best over the best of random halves of the rounds."""
    of = samples[samples["key"].isin(points.index)]
    batch, rounds, random = points["setting.plan.global_batch"], np.unique(of["round"]), np.random.default_rng(seed)
    chosen, costs = (points["step_s"] / batch).idxmin(), []
    for _ in range(halves):
        first = of["round"].isin(random.permutation(rounds)[: len(rounds) // 2])
        picked, timed = (of[each].groupby("key")["step_s"].median() / batch for each in (first, ~first))
        if picked.notna().all() and timed.notna().all():
            costs.append(timed[chosen] / timed[picked.idxmin()] - 1)
    every = of.groupby("key")["step_s"].median() / batch
    return float(np.mean(costs)) if costs else every[chosen] / every.min() - 1
