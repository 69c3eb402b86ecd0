"""How dpsim is installed, and that nothing tells people to install another program of the same name."""

from __future__ import annotations

import ast
import re
import warnings
from importlib import reload
from pathlib import Path

import pytest

import dpsim
from dpsim import cli, installation
from dpsim.harness import doctor

ROOT = Path(__file__).parents[1]
FROM_AN_INDEX = re.compile(
    r"(?:pip3? install|uvx(?! --from [^ ]*[.]whl )|uv pip install|uv add)[ ]"
    r"(?:[^`\n;]*[ '\"])?dpsim(?:-train)?(?![\w./_-])"
)


def test_no_page_and_no_message_installs_dpsim_from_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    files = [*pages, *(ROOT / "dpsim").rglob("*.py"), *(ROOT / "dpsim").rglob("*.ipynb")]
    texts = {path: path.read_text() for path in files}
    found = {str(path): FROM_AN_INDEX.findall(text) for path, text in texts.items() if FROM_AN_INDEX.search(text)}
    assert not found
    assert FROM_AN_INDEX.search("pip install 'dpsim[mpich]'") and FROM_AN_INDEX.search("run pip install -U dpsim-train")
    assert FROM_AN_INDEX.search("uvx dpsim") and not FROM_AN_INDEX.search("uvx --from dist/a.whl dpsim doctor")


def test_every_extra_that_a_message_names_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = set()
    for path in (ROOT / "dpsim").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.search(r"\binstall$", ast.unparse(node.func)):
                named |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    assert named == {"mpich", "parquet", "torch"}
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in named)


def test_outside_of_a_checkout_the_packages_themselves_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installation.install("mpich") == "pip install -e '.[mpich]'"
    monkeypatch.setattr(installation, "checkout", lambda: None)
    lines = ["numpy>=2.4", 'mpich>=5.0; extra == "mpich"', "ruff>=0.17; extra == 'dev'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda name: lines if name == "dpsim-train" else None)
    assert installation.install("mpich") == "pip install 'mpich>=5.0'"
    monkeypatch.setattr(installation, "INDEX", "dpsim-train")
    assert installation.install("mpich") == "pip install 'dpsim-train[mpich]'"


def test_the_other_program_of_this_name_is_told_and_this_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = tmp_path / "dpsim-0.1.0.dist-info"
    ours.mkdir()
    (ours / "entry_points.txt").write_text("[console_scripts]\ndpsim = dpsim.cli:main\n")
    (tmp_path / "dpsim_train-0.1.0.dist-info").mkdir()
    assert installation.other_program(tmp_path) == installation.other_program(tmp_path / "missing") == ""
    (tmp_path / "dpsim-1.4.0.dist-info").mkdir()
    assert installation.other_program(tmp_path) == "dpsim-1.4.0"
    monkeypatch.setattr(installation, "_site_packages", lambda: tmp_path)
    with pytest.warns(UserWarning, match="dpsim-1.4.0 is another program.*pip uninstall dpsim, then pip install"):
        reload(dpsim)
    finding = doctor._installation()
    assert finding.state == "fail" and "dpsim-1.4.0" in finding.found and "pip uninstall dpsim" in finding.remedy
    monkeypatch.delattr(dpsim, "_OTHER")  # as where the other one's __init__.py is in this one's place
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    said = capsys.readouterr().err
    assert "dpsim-1.4.0 is another program" in said and "pip uninstall dpsim, then pip install" in said
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reload(dpsim)
