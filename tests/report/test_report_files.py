import html
import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from report_factory import PACED, sweep
from rich.console import Console

from dpsim.errors import ConfigError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.questions import QUESTIONS
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison, SweepData
from dpsim.report.charts import Bars
from dpsim.report.figures import draw, on_axes
from dpsim.report.figures.style import NARROW_IN, WIDE_IN, heading
from dpsim.report.sweep.charts import parts_chart, setting_label
from dpsim.report.sweep.content import answers, for_terminal, tiles
from dpsim.report.sweep.timelines import Timelines
from dpsim.report.sweep.write import write_report
from dpsim.report.table import Column, narrowed, table
from dpsim.report.words import enumerated, percent


@pytest.fixture(scope="module")
def compared() -> Comparison:
    return compare(*sweep())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, compared: Comparison) -> Path:
    path = tmp_path_factory.mktemp("report")
    predictions, results = sweep()
    written = write_report(path, SweepData(predictions, results, compared))
    assert all(p.is_file() for p in written)
    return path


def test_all_files_are_written(folder: Path) -> None:
    figures = {f"{name}.{kind}" for name in ("step_time", "timeline", "where_time_goes") for kind in ("svg", "png")}
    assert {p.name for p in folder.iterdir()} == figures | {"index.html", "report.md"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.links.append(value or "")


def test_the_page_needs_nothing_from_elsewhere(folder: Path) -> None:
    page = _Page()
    text = (folder / "index.html").read_text()
    page.feed(text)
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|http://(?!www.w3.org/)|https://", text)
    elsewhere = [link for link in page.links if not link.startswith("#")]
    assert elsewhere == ["report.md"] and (folder / "report.md").is_file()
    assert "@import" not in text
    assert set(re.findall(r"url\(([^)]*)\)", text.partition("<script>\n")[0])) <= {f"#{name}" for name in page.ids}


def test_ids_of_the_page_are_unique_and_references_resolve(folder: Path) -> None:
    page = _Page()
    page.feed((folder / "index.html").read_text())
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)


def test_page_and_markdown_tell_the_answer_and_mark_emulation(folder: Path, compared: Comparison) -> None:
    for name in ("index.html", "report.md"):
        text = html.unescape((folder / name).read_text())
        for sentence in answers(compared):
            assert sentence in text
        assert f"{PACED} (emulated)" in text
        assert compared.predictions_sha256 in text
        assert compared.predicted_at in text


def test_labels_of_the_best_points_stand_clear_of_what_is_drawn_and_lead_to_it(compared: Comparison) -> None:
    figure = draw(QUESTIONS["fusion-threshold"].chart(compared))
    figure.canvas.draw()
    for axis, group in zip(figure.axes, compared.groups, strict=True):
        assert axis.get_ylim()[0] >= 0
        several = [p for p in compared.members(group) if p.devices > 1]
        drawn = [1e3 * y for p in several for y in (p.measured_low_s, p.measured_high_s, p.predicted_low_s)]
        marks = [1e3 * y for p in several for y in (p.measured_step_s, p.predicted_step_s)]
        notes = [child for child in axis.get_children() if isinstance(child, Annotation) and child.arrow_patch]
        assert 1 <= len(notes) <= 2
        for note in notes:
            height = note.get_position()[1]
            assert not min(drawn) <= height <= max(drawn)
            assert note.xy[1] in [pytest.approx(y) for y in marks]


def test_the_name_of_a_figure_is_the_sentence_on_what_to_see_in_it(folder: Path) -> None:
    text = (folder / "index.html").read_text()
    labels = re.findall(r'<svg role="img" aria-label="([^"]*)"', text)
    sentences = re.findall(r"<figcaption><strong>(.*?)</strong>", text)
    assert len(labels) == 2 * len(sentences) == 6
    for label, sentence in zip(labels, (each for each in sentences for _ in range(2)), strict=True):
        assert label.endswith(sentence) and len(sentence) > 40


def test_figures_mark_emulation(folder: Path) -> None:
    for name in ("step_time", "timeline", "where_time_goes"):
        assert f"{PACED} (emulated)" in (folder / f"{name}.svg").read_text()


@pytest.mark.slow
def test_writing_twice_gives_the_same_page(folder: Path, tmp_path: Path, compared: Comparison) -> None:
    predictions, results = sweep()
    write_report(tmp_path, SweepData(predictions, results, compared))
    for name in ("index.html", "report.md", "step_time.svg"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 1},
        *(
            pytest.param(o, marks=pytest.mark.slow)
            for o in ({"timelines": False}, {"devices": (1,)}, {"networks": ("node",)})
        ),
    ],
)
def test_poor_sweeps_still_give_a_report(tmp_path: Path, options: dict[str, object]) -> None:
    predictions, results = sweep(**options)  # type: ignore[arg-type]
    written = {p.name for p in write_report(tmp_path, SweepData(predictions, results, compare(predictions, results)))}
    assert {"index.html", "report.md"} <= written
    assert ("timeline.svg" in written) is (options not in ({"timelines": False}, {"devices": (1,)}))


def test_text_from_records_is_escaped(tmp_path: Path) -> None:
    predictions, results = sweep(networks=("node",), rounds=1)
    results = msgspec.structs.replace(results, warnings=("<script>alert(1)</script>",))
    write_report(tmp_path, SweepData(predictions, results, compare(predictions, results)))
    assert "<script>alert" not in (tmp_path / "index.html").read_text()
    assert "<script>" not in (tmp_path / "report.md").read_text()


def test_a_folder_that_cannot_be_written_is_told_kindly(tmp_path: Path, compared: Comparison) -> None:
    (tmp_path / "file").write_text("in the way")
    predictions, results = sweep()
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "file", SweepData(predictions, results, compared))


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_terminal_table_fits_and_keeps_what_matters(compared: Comparison, width: int) -> None:
    text = _shown(compared, width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("measured", "predicted", "speedup", "(emulated)", "★", "◆", "skill"):
        assert words in text
    assert "…" not in text


def _shown(comparison: Comparison, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(for_terminal(comparison))
    return out.getvalue()


def test_names_are_enumerated_once_each_as_in_a_sentence() -> None:
    texts = {"": (), "a": ("a", "a"), "a and b": ("a", "b"), "a, b and c": ("a", "b", "a", "c")}
    assert {enumerated(names) for names in texts.values()} == set(texts)


def test_percent_reads_like_a_person_writes() -> None:
    assert [percent(0.0123), percent(-0.5, sign=True), percent(12.0)] == ["1.2%", "-50.0%", "1200%"]


def test_importing_comparison_and_report_loads_no_matplotlib() -> None:
    code = "import sys, dpsim.harness.sweep.compare, dpsim.report.sweep.content; print('matplotlib' in sys.modules)"
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert actual.stdout.strip() == "False"


def test_only_the_verdict_the_main_figure_and_the_main_table_are_unfolded(folder: Path, compared: Comparison) -> None:
    text = (folder / "index.html").read_text()
    unfolded = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
    assert text.count("<figure>") > 1 and text.count("<table>") > 1
    assert unfolded.count("<figure>") == unfolded.count("<table>") == 1
    assert compared.predictions_sha256 not in unfolded
    assert all(sentence in html.unescape(unfolded) for sentence in answers(compared)[:3])


def test_a_table_of_a_page_leaves_out_the_most_dispensable_columns_that_do_not_fit() -> None:
    columns: list[Column[str]] = [
        Column(head="a", cell=lambda row: row),
        Column(head="b", cell=lambda row: row * 2, dispensable=2),
        Column(head="c", cell=lambda row: row * 3, dispensable=1),
    ]
    wide = table(columns=columns, sections={"": ["12345"]})
    assert narrowed(wide, 36) == wide
    narrow = narrowed(wide, 30)
    assert [column.head for column in narrow.columns] == ["a", "c"]
    assert narrow.sections[0].rows == (("12345", "123451234512345"),)
    assert [column.head for column in narrowed(wide, 1).columns] == ["a"]


def test_no_card_names_a_best_threshold_beside_the_verdict_that_none_is_surely_best(compared: Comparison) -> None:
    group = compared.groups[0]
    sure = msgspec.structs.replace(group, below_noise=False, effect=0.2, noise=0.01, noise_floor=0.01)
    unsure = msgspec.structs.replace(group, below_noise=False, effect=0.12, noise=0.1, noise_floor=0.1)
    assert any(tile.label.startswith("best threshold") for tile in tiles(compared, sure))
    labels = [tile.label for tile in tiles(compared, unsure)]
    assert not any(label.startswith("best threshold") for label in labels)
    assert any("no threshold is surely best" in label for label in labels)


def test_step_times_are_drawn_from_zero_with_the_labels_of_two_best_points_on_different_sides() -> None:
    def measured(point: ComparedPoint, ratio: float, **marks: bool) -> ComparedPoint:
        step_s = point.predicted_step_s * ratio
        unmarked = {"is_best_measured": False, "is_best_predicted": False}
        interval = {"measured_low_s": step_s, "measured_high_s": step_s}
        return point.replaced(measured_step_s=step_s, **interval, **unmarked | marks)

    comparison = compare(*sweep(networks=("node",)))
    first, second, *rest = [p for p in comparison.scored if p.devices > 1]
    best_measured = measured(first, 1.1, is_best_measured=True)
    best_predicted = measured(second, 0.9, is_best_predicted=True)
    rest = [measured(point, 1.0) for point in rest]
    changed = msgspec.structs.replace(comparison, points=(best_measured, best_predicted, *rest))
    axis = on_axes(Figure().add_subplot(), QUESTIONS["fusion-threshold"].chart(changed).panels[0])
    assert axis.get_ylim()[0] == 0
    notes = {n.get_text(): n.get_position()[1] - n.xy[1] for n in axis.get_children() if isinstance(n, Annotation)}
    assert notes["best measured"] * notes["best predicted"] < 0


def test_many_settings_stand_fastest_first_and_leaves_are_named() -> None:
    comparison = compare(*sweep(networks=("node",)))
    points = comparison.scored
    fields = ("devices", "leaves")
    assert setting_label(points[0], fields).endswith(", 0 leaves")
    no_timelines = Timelines(measured={}, predicted={}, gradient_bytes={})
    for compared, ordered in (("fusion_threshold_bytes", "overlap"), True), (("fusion_threshold_bytes",), False):
        (panel,) = parts_chart(msgspec.structs.replace(comparison, compared=compared), no_timelines).panels
        assert isinstance(panel, Bars)
        steps_ms = [sum(measured.values()) for _, measured, _ in panel.bars]
        in_order = [p.measured_step_s * 1e3 for p in points if p.devices > 1]
        assert steps_ms == pytest.approx(sorted(in_order) if ordered else in_order)


def test_a_long_title_of_a_panel_has_several_lines_on_a_phone() -> None:
    for width, lines in ((NARROW_IN, 3), (WIDE_IN, 1)):
        axis = Figure(figsize=(width, 3)).add_subplot()
        heading(axis, "2 devices on paced:200us,1gbit (emulated), PyTorch DDP by an MPI hook", "ms per step")
        assert len(axis.get_title(loc="left").splitlines()) == lines
