"""Settings of the libraries of GPUs for reproducible training: set, or refused with what to do."""

from __future__ import annotations

import pytest

from dpsim.comm.cuda.reproducible import fix_libraries, settings
from dpsim.errors import ConfigError

FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUPY_ACCELERATORS": "", "CUPY_TF32": "0"}


def test_variables_are_set_before_cupy_is_imported_and_stay() -> None:
    environment = {"HOME": "/"}
    fix_libraries(environment, imported=("numpy",))
    assert environment == FIXED | {"HOME": "/"}
    fix_libraries(environment, imported=("numpy", "cupy"))
    assert environment == FIXED | {"HOME": "/"}
    assert settings(environment) == "CUBLAS_WORKSPACE_CONFIG=:4096:8, CUPY_ACCELERATORS=, CUPY_TF32=0"
    assert settings({}) == ""


def test_tf32_that_a_user_asks_for_is_kept_and_recorded() -> None:
    environment = {"CUPY_TF32": "1"}
    fix_libraries(environment, imported=())
    assert environment == FIXED | {"CUPY_TF32": "1"} and settings(environment).endswith("CUPY_TF32=1")


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUBLAS_WORKSPACE_CONFIG", ":16:8"), ("CUBLAS_WORKSPACE_CONFIG", ""), ("CUPY_ACCELERATORS", "cub")],
)
def test_another_value_of_a_users_is_refused_and_nothing_is_set(name: str, value: str) -> None:
    environment = {name: value}
    with pytest.raises(ConfigError, match=f"{name}={value} in reproducible training on GPUs") as error:
        fix_libraries(environment, imported=())
    assert environment == {name: value} and f"unset {name}" in str(error.value)


def test_cupy_that_was_imported_without_them_is_refused() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with pytest.raises(ConfigError, match="after CuPy was imported without CUPY_ACCELERATORS="):
        fix_libraries(environment, imported=("cupy",))
