"""Writes the what-if page: world, engine and charts in one HTML file that needs no server and no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec
from jinja2 import PackageLoader
from markupsafe import Markup

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.explore.world import world
from dpsim.machine import Machine
from dpsim.model.cautions import cautions
from dpsim.model.defaults import for_prediction
from dpsim.model.points import plan_one
from dpsim.model.residuals import LEVEL
from dpsim.network import Network
from dpsim.plan import Plan
from dpsim.report.page import templates
from dpsim.report.palette import variables
from dpsim.setting import Grid
from dpsim.strategy import ASYNCHRONOUS, parse_strategy
from dpsim.workload import Workload

Record = dict[str, Any]
ENGINE = (
    *("fusion", "lowering", "divided", "algorithms", "costs", "link", "scaling", "uncertainty", "prices"),
    *("queue", "walk", "memory", "interval", "predict"),
)
"""The files of the engine; each may call functions of any other one."""
_CHARTS = ("format", "charts", "controls", "search", "page")
EXPLORED = ("data-parallel", "zero1", "zero2", "zero3", "zero3:prefetch=2", "zero3:reshard=no")
"""The strategies whose lowering the engine has; ``dpsim.explore.written.DIVIDED`` are those of the others."""
MOST_BYTES = 1_000_000
"""The bytes of a page: what a browser opens at once, and a mail takes."""
DEVICES = 8
"""The devices with which a page begins, where nobody says how many."""


_OF_A_STUDY = (
    "The layers and the machine are those that the study measured, of which no command has files, and the interval is"
    " that of its report. A speedup here is at the same local batch; the study's report takes speedups as its"
    " experiment scales"
)


def engine() -> str:
    """Return the engine: plain JavaScript whose ``predict(world, setting)`` is ``dpsim.model`` of that setting."""
    return _scripts("engine", ENGINE)


def script() -> str:
    """Return the script of a page: the engine, and what draws its answers."""
    return f"{engine()}\n{_scripts('page', _CHARTS)}"


def page(workload: Workload, machine: Machine, files: str, devices: int | str = DEVICES) -> str:
    """Return the page of a workload on a machine, which begins with the defaults of ``dpsim predict``.

    ``files`` are the flags that name both on the command line. Raises ``ConfigError`` for what a page cannot hold, and
    where the machine does not price a collective.
    """
    known = for_prediction(workload, machine)
    plan, told = plan_one(workload, known, Grid.of(devices=devices))
    return page_of_plan(workload, known, plan, files, told=told.sentence)


def page_of_plan(
    workload: Workload,
    machine: Machine,
    plan: Plan,
    files: str = "",
    *,
    told: str = "",
    measured: Sequence[Record] = (),
) -> str:
    """Return the page of a workload on a machine, which begins with a plan.

    ``told`` says what of it a script told, and ``measured`` are settings of the page with their ``step_s``. Raises
    ``ConfigError`` for what a page cannot hold.
    """
    if Network.parse(machine.network).conditions:
        raise ConfigError(
            f"a page of the network {machine.network}",
            allowed="a network without conditions: a page does not compute what ranks hide where links are not alike",
            remedy=f"take a machine of {Network.parse(machine.network).plain.token}",
        )
    begun = setting_of(plan)
    known = world(
        workload, machine, [begun["local_batch"]], plan.optimizer, machine.interval_widths if measured else ()
    )
    strategies = _strategies(workload, known["schedules"])
    if begun["strategy"] not in strategies:
        begun["strategy"] = EXPLORED[0]
    of_page = known | {
        "strategies": {text: setting_of_strategy(text) for text in strategies},
        "setting": begun,
        "files": files,
        "level": f"{LEVEL:.0%} interval"
        if any(width.studies for width in machine.interval_widths)
        else "assumed interval",
        "measured": measured,
    }
    notes = [
        *filter(None, [told]),
        *([_OF_A_STUDY] if measured else []),
        *_left_out(workload, machine, plan),
        *of_page["left_out"],
        *cautions(machine, [plan], workload),
    ]
    data = codec.to_json(of_page, indent=None).replace("<", "\\u003c")
    template = templates(PackageLoader("dpsim.explore", "page"), escape_html=True).get_template("page.html.j2")
    html = template.render(world=of_page, colours=variables(), notes=notes, data=Markup(data), script=Markup(script()))
    if len(html.encode()) > MOST_BYTES:
        raise ConfigError(
            f"a page of workload {workload.name!r} with {len(workload.layers)} layers on machine {machine.name!r},"
            f" which would take {len(html.encode()) / 1e6:.1f} MB",
            allowed=f"up to {MOST_BYTES / 1e6:.0f} MB, which a browser opens at once",
            remedy="join layers in the workload file, or ask dpsim predict",
        )
    return html


def setting_of(plan: Plan) -> Record:
    """Return a plan as a setting of the page; the strategy as it is written."""
    names = "devices accumulate fusion_rule fusion_threshold_bytes cycle_s algorithm overlap batch_norm strategy"
    return {name: getattr(plan, name) for name in names.split()} | {
        "local_batch": round(plan.local_batch),
        "devices_a_node": plan.devices_a_node if plan.layout else 0,
        "latency_s": None,
        "bandwidth_bytes_per_s": None,
        "contention": None,
    }


def setting_of_strategy(text: str) -> Record:
    """Return a strategy as the engine takes it: its name and its settings."""
    strategy = parse_strategy(text)
    derived = ("name", "text", "stages", "parts", "classes", "sharded", "gathers")
    return msgspec.structs.asdict(strategy) | {name: getattr(strategy, name) for name in derived}


def _strategies(workload: Workload, schedules: Sequence[Record]) -> Sequence[str]:
    """The strategies of a page; a script's own units of ``fully_shard`` have no lowering in the engine."""
    units = workload.ddp is not None and bool(workload.ddp.units)
    lowered = [text for text in EXPLORED if not (units and text.startswith("zero3"))]
    return [*lowered, *dict.fromkeys(schedule["strategy"] for schedule in schedules)]


def _left_out(workload: Workload, machine: Machine, plan: Plan) -> list[str]:
    """What a page leaves out, in sentences."""
    sentences = [
        f"Left out: the asynchronous strategies {' and '.join(ASYNCHRONOUS)}, reproducible training in leaves, and"
        " gradients sent in 16 bits",
    ]
    if machine.link is None:
        sentences.append("Left out: latency and bandwidth, for this machine has tables and states no [link]")
    elif machine.allreduce or machine.halves or machine.overlap:
        sentences.append(
            "Moving latency or bandwidth prices collectives by the formula of the machine's link, in place of tables"
        )
    if plan.leaves:
        sentences.append("The study trained in leaves; this page computes whole batches")
    if plan.wire_dtype is not None:
        sentences.append(f"The script sends gradients as {plan.wire_dtype}; this page sends them as they are")
    if not workload.deferred:
        sentences.append("The script reduces gradients in several micro-batches; this page in the last one alone")
    if workload.ddp is not None and workload.ddp.units:
        sentences.append("Left out: ZeRO-3, whose units the script's fully_shard decides (dpsim predict has them)")
    return sentences


def _scripts(folder: str, names: Sequence[str]) -> str:
    files = (resources.files("dpsim.explore") / folder / f"{name}.js" for name in names)
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
