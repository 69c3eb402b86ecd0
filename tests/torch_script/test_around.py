"""The seam around a script: when its steps begin, train, update and end, as every listener is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dpsim

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")

from dpsim.torch.script.probe.around import Script, leading_extent  # noqa: E402

pytestmark = pytest.mark.torch


class Listener(Script):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        for name in ("step_begins", "forward_begins", "backward_begins", "backward_ends", "step_ends"):
            setattr(self, name, lambda *_, name=name: self.told.append(name))
        for name in ("update_begins", "update_ends"):
            setattr(self, name, lambda optimizer, name=name: self.told.append(f"{name} {optimizer}"))


def model() -> Any:
    module = torch.nn.Linear(2, 2)
    return SimpleNamespace(module=module, modules=module.modules, require_backward_grad_sync=True)


def micro_batch(listener: Listener, ddp: Any, *, synchronises: bool = True) -> None:
    ddp.require_backward_grad_sync = synchronises
    listener.forward(lambda *_: None, ddp, torch.zeros(4, 2))
    listener.backward(lambda: None)


MICRO_BATCH = ["forward_begins", "backward_begins", "backward_ends"]


def test_a_step_ends_with_the_backward_that_synchronises() -> None:
    listener, ddp = Listener(), model()
    for synchronises in (False, True, True):
        micro_batch(listener, ddp, synchronises=synchronises)
    one = ["step_begins", *MICRO_BATCH]
    assert listener.told == [*one, *MICRO_BATCH, "step_ends", *one, "step_ends"]
    assert (listener.synchronised, listener.micro_batches) == (2, 1)


def test_a_listener_of_whole_steps_has_one_until_the_update_behind_a_backward_that_synchronised() -> None:
    listener, ddp = Listener(), model()
    listener.until_update = True
    for _ in range(2):
        for synchronises in (True, False, True):
            micro_batch(listener, ddp, synchronises=synchronises)
        listener.before_update("optimizer")
        listener.after_update("optimizer")
    assert listener.told.count("step_begins") == 3, "before the first update a step ends as for other listeners"
    assert (listener.micro_batches, listener.reductions, listener.unreduced_updates) == (3, [0, 2], 0)


def test_an_update_within_the_backward_that_synchronises_ends_the_step_with_it() -> None:
    listener, ddp = Listener(), model()
    listener.until_update = True

    def update() -> None:
        listener.before_update("optimizer")
        listener.after_update("optimizer")

    for _ in range(3):
        listener.forward(lambda *_: None, ddp, torch.zeros(4, 2))
        listener.backward(update)
    assert listener.told.count("step_begins") == 3 and listener.reductions == [0]


def test_a_flag_that_is_set_after_the_forward_counts_for_fsdp_and_is_late_for_ddp() -> None:
    for reads_flag_in_backward in (False, True):
        listener, ddp = Listener(), model()
        ddp.reads_flag_in_backward = reads_flag_in_backward
        listener.forward(lambda *_: None, ddp, torch.zeros(4, 2))
        ddp.require_backward_grad_sync = False
        listener.backward(lambda: None)
        assert (listener.reductions, listener.late_flags) == (([], 0) if reads_flag_in_backward else ([0], 1))


def test_updates_of_gradients_that_were_not_reduced_are_counted() -> None:
    listener, ddp = Listener(), model()
    for synchronises, unreduced in ((True, 0), (False, 1), (False, 2), (True, 0)):
        micro_batch(listener, ddp, synchronises=synchronises)
        for optimizer in ("one", "another of the same gradients"):
            listener.before_update(optimizer)
            listener.after_update(optimizer)
        assert listener.unreduced_updates == unreduced


def test_a_backward_in_another_or_without_a_forward_is_no_micro_batch() -> None:
    listener, ddp = Listener(), model()
    listener.forward(lambda *_: None, ddp, torch.zeros(4, 2))
    listener.backward(lambda: listener.backward(lambda: None))
    listener.backward(lambda: None)
    assert listener.told == ["step_begins", *MICRO_BATCH, "step_ends"]


def test_a_backward_that_raises_is_over() -> None:
    listener, ddp = Listener(), model()
    listener.forward(lambda *_: None, ddp, torch.zeros(4, 2))
    with pytest.raises(ZeroDivisionError):
        listener.backward(lambda: 1 / 0)
    listener.backward(lambda: None)
    assert listener.told.count("backward_ends") == listener.told.count("step_ends") == 1


def test_an_update_begins_anew_behind_its_closure_and_contains_that_of_another_optimizer() -> None:
    listener, ddp = Listener(), model()
    listener.before_update("outer")
    micro_batch(listener, ddp)
    listener.before_update("inner")
    listener.after_update("inner")
    listener.after_update("outer")
    updates = [each for each in listener.told if each.startswith("update")]
    assert updates == ["update_begins outer", "update_begins outer", "update_ends outer"]
    assert listener.told.index("step_ends") < listener.told.index("update_ends outer")


def test_an_update_is_told_behind_one_that_has_raised() -> None:
    listener = Listener()
    listener.before_update("outer")
    listener.before_update("outer")
    listener.after_update("outer")
    assert listener.told == ["update_begins outer", "update_begins outer", "update_ends outer"]


@pytest.mark.parametrize(
    ("values", "samples"),
    [
        ((torch.zeros(3, 2), torch.zeros(5)), 3),
        ((torch.tensor(1.0), torch.zeros(0, 2), [{"x": torch.zeros(7)}]), 7),
        (("text", 4), 1),
    ],
)
def test_samples_are_the_leading_extent_of_the_first_tensor_that_has_one(values: Any, samples: int) -> None:
    assert leading_extent(values) == samples


def test_what_was_put_around_a_process_goes_again() -> None:
    ddp_class = torch.nn.parallel.DistributedDataParallel
    names = ((ddp_class, "__init__"), (ddp_class, "forward"), (torch.autograd, "backward"))
    before = [getattr(owner, name) for owner, name in names]
    script = Script()
    script.listen_to_construction(1e6)
    script.listen()
    script.listen_to_updates_and_input()
    assert all(getattr(owner, name) is not original for (owner, name), original in zip(names, before, strict=True))
    script.leave()
    assert [getattr(owner, name) for owner, name in names] == before


def test_one_file_decides_what_a_step_is() -> None:
    """What a forward that trains is, which cap DDP gets, and the time without a core stand nowhere else."""
    files = sorted((Path(dpsim.__file__).parent / "torch" / "script").rglob("*.py"))
    for words in ("is_grad_enabled", '"bucket_cap_mb"', "thread-self/schedstat"):
        assert [path.name for path in files if words in path.read_text()] == ["around.py"], words
