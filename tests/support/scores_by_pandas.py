"""Skill, regret and the best simple guess of each network of a sweep, by pandas alone.

It reads ``results.json`` and ``blind.json`` (``predictions.json`` where nothing was predicted from the same minutes),
and computes medians, errors and halves without dpsim. Which points are compared with each other, and which guesses
count, is the question's: its caller says it.
"""

import json
from itertools import accumulate, chain, repeat

import numpy as np
import pandas as pd


def unpacked(value):
    """Return a record without its short forms (``=rows`` and so on)."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict) or len(value) != 1 or not (kind := next(iter(value))).startswith("="):
        return {key: unpacked(each) for key, each in value.items()} if isinstance(value, dict) else value
    of = unpacked(value[kind])
    if kind == "=rows":
        return [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=True)]
    if kind == "=steps":
        return [*accumulate(of)]
    first, second = of
    if kind == "=lists":
        rest = iter(second)
        return [[next(rest) for _ in range(length)] for length in first]
    if kind == "=distinct":
        return [first[index] for index in second]
    if kind == "=runs":
        return [*chain(*map(repeat, first, second))]
    return [number / 10**first for number in second]  # =decimals


def table(folder, name):
    """Return the points of a record as a table, with their settings beside; ``key`` is the same in all records."""
    points = unpacked(json.loads((folder / name).read_text()))["points"]
    frame = pd.DataFrame(points).drop(columns="setting")
    frame["key"] = [json.dumps(point["setting"] | {"repeat": 0}) for point in points]
    for name in ("network", "runtime"):
        frame[name] = [point["setting"][name] for point in points]
    for name in ("devices", "global_batch"):
        frame[name] = [point["setting"]["plan"][name] for point in points]
    return frame


def measured(folder, least_clean=6):
    """Return the samples that count, a row for each: the clean ones of a setting where these are enough."""
    points = table(folder, "results.json")
    marks = points["clean"] if "clean" in points else [[]] * len(points)
    points["clean"] = [mark or [None] * len(steps) for mark, steps in zip(marks, points["step_s"], strict=True)]
    samples = points.explode(["step_s", "round", "clean"]).astype({"step_s": float, "round": int})
    clean = samples["clean"].isin([True]).groupby(samples["key"]).transform("sum")
    known = samples["clean"].notna().groupby(samples["key"]).transform("any")
    return samples[~known | samples["clean"].isin([True]) | ((clean < least_clean) & samples["clean"].notna())]


def network_scores(folder, groups, nulls):
    """Return the scores of each network. ``groups`` names the group of each key, ``nulls`` the guesses that count."""
    predicted = table(folder, "blind.json" if (folder / "blind.json").exists() else "predictions.json")
    samples = measured(folder)
    step_s = samples.groupby("key")["step_s"].median().rename("measured_s")
    points = predicted.drop_duplicates("key").set_index("key").join(step_s, how="inner")
    points["group"] = pd.Series(groups)
    points = points.dropna(subset="group")
    several, scores = points[points["devices"] > 1], {}
    for place, of in several.groupby(["network", "runtime"]):
        model = (of["step_s"] / of["measured_s"] - 1).abs().median()
        guesses = {
            name: (of["null_step_s"].map(lambda each, name=name: each[name]) / of["measured_s"] - 1).abs().median()
            for name in nulls
            if all(name in each for each in of["null_step_s"])
        }
        best = min(guesses, key=guesses.get)
        costs = [regret(points[points["group"] == group], samples) for group in of["group"].unique()]
        scores[place] = {
            "median_abs_error": model, "null": best, "null_median_abs_error": guesses[best],
            "skill": 1 - model / guesses[best], "regret": max(costs),
        }  # fmt: skip
    return scores


def regret(points, samples, halves=200, seed=0):
    """Return the mean cost of the predicted best over the best of random halves of the rounds."""
    of = samples[samples["key"].isin(points.index)]
    batch, rounds, random = points["global_batch"], np.unique(of["round"]), np.random.default_rng(seed)
    chosen, costs = (points["step_s"] / batch).idxmin(), []
    for _ in range(halves):
        first = of["round"].isin(random.permutation(rounds)[: len(rounds) // 2])
        picked, timed = (of[each].groupby("key")["step_s"].median() / batch for each in (first, ~first))
        if picked.notna().all() and timed.notna().all():
            costs.append(timed[chosen] / timed[picked.idxmin()] - 1)
    every = of.groupby("key")["step_s"].median() / batch
    return float(np.mean(costs)) if costs else every[chosen] / every.min() - 1
