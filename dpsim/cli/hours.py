"""The flags of a training whose hours and cost are asked for: its samples, and the price of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpsim.cli import flags
from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.model.hours import Training

_TOKENS = "tokens"


class TrainingFlags(flags.Flags, group="Hours and money"):
    """The flags of what is trained on, and what it costs."""

    samples: str | None = flags.flag(
        "Samples of an epoch, like 1.28M, or its tokens, like 300Btokens: also predict hours, of these samples and not"
        " of a quality."
    )
    tokens_per_sample: str | None = flags.flag("Also predict tokens a second, of samples with so many.")
    epochs: float | None = flags.flag("With --samples: how often they are trained on (1).")
    price: float | None = flags.flag("With --samples: what one device costs an hour, in any currency.")

    def training(self) -> Training | None:
        """Return the training, ``None`` where nothing is asked of one. Raises ``ConfigError``."""
        from dpsim.model.hours import Training
        from dpsim.units import parse_count

        if not self.given():
            return None
        tokens = self.tokens_per_sample
        tokens_per_sample = None if tokens is None else parse_count(tokens, "--tokens-per-sample", "2048 or 4k")
        samples = None if self.samples is None else samples_of(self.samples, tokens_per_sample)
        return Training(samples=samples, epochs=self.epochs, tokens_per_sample=tokens_per_sample, price=self.price)


def samples_of(text: str, tokens_per_sample: float | None = None) -> float:
    """Return how many samples a text says: ``1.28M``, or with the tokens of a sample ``300Btokens``.

    Raises ``ConfigError``.
    """
    from dpsim.units import parse_count

    number = text.strip().lower().removesuffix(_TOKENS)
    of_tokens = number != text.strip().lower()
    if of_tokens and not tokens_per_sample:
        raise ConfigError(
            f"--samples {text}",
            allowed="samples, or tokens beside --tokens-per-sample",
            remedy="add the tokens of a sample: --tokens-per-sample 2048",
        )
    count = parse_count(number, "--samples", "1.28M, or 300Btokens with --tokens-per-sample")
    return count / tokens_per_sample if of_tokens and tokens_per_sample else count
