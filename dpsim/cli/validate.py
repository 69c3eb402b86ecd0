"""``dpsim validate``: predictions of other people's published measurements, scored."""

from __future__ import annotations

from pathlib import Path

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim validate
  dpsim validate --output reports/validation
  dpsim validate --predictions predictions.json
  dpsim validate --submission predictions.json
  dpsim validate --audit"""


class ValidateFlags(flags.Flags):
    """The flags of what is judged, and of what is written."""

    submission: Path | None = flags.flag("File of predictions with intervals, scored in place of dpsim's.")
    sets: Path | None = flags.flag("Folder of your own with sets and cases, in place of those of dpsim.")
    outcomes: Path | None = flags.flag("File that makes the outcomes of sealed rows public.")
    audit: bool = flags.flag("Predict nothing: list what is wrong in the published tables.", default=False)
    predictions: Path | None = flags.flag("Also write dpsim's predictions to this file, as a submission.")
    workers: int = flags.flag("Processes that predict side by side.", default=1)
    output: Path | None = flags.flag("Folder for the report, its figures and points.csv.")
    json: flags.Json = False


_OF_PREDICTIONS = ("submission", "outcomes", "predictions", "output")


def validate(*, given: ValidateFlags) -> None:
    """Predict what other people measured and published, and score that.

    Sets of measurements come with dpsim. No row is predicted from itself. Nulls
    know what the prediction knows.
    """
    from dpsim import codec
    from dpsim.errors import ConfigError
    from dpsim.folder_lock import locked
    from dpsim.launch.workers import workers
    from dpsim.validation import page
    from dpsim.validation.audit import audit
    from dpsim.validation.published import FOLDER, read_sets
    from dpsim.validation.run import validate
    from dpsim.validation.submission import submission

    folder = given.sets or FOLDER
    idle = [flag for flag in _OF_PREDICTIONS if getattr(given, flag) is not None]
    if given.audit and idle:
        raise ConfigError(
            f"--audit with --{', --'.join(idle)}",
            allowed="--audit with --sets and --json: it predicts nothing",
            remedy="leave out --audit, or the other flags",
        )
    if given.audit:
        doubts = audit(read_sets(folder))
        if given.json:
            show.print_json("validate", [doubt.values() for doubt in doubts], {"doubts": len(doubts)})
        else:
            show.rich(page.audit_report(doubts))
        return
    flags.writable(given.predictions, "submission", flag="--predictions", inputs=(given.submission, given.outcomes))
    flags.writable(given.output, folders=("report",), inputs=(given.submission, given.sets, given.outcomes))
    outcomes = () if given.outcomes is None else (given.outcomes,)
    with workers(given.workers) as executor:
        result = validate(folder, outcomes=outcomes, submission=given.submission, executor=executor)
    if given.predictions is not None:
        codec.write(given.predictions, submission(result.predictor, result.rows))
    if given.output is not None:
        with locked(given.output):
            page.write_validation(given.output, result)
    if given.json:
        show.print_json("validate", [row.values() for row in result.rows], result.summary())
        return
    show.rich(page.for_terminal(result))
    if given.output is not None:
        print(f"report: {given.output / 'index.html'}")
