"""Learning-rate schedules by name: the factor of the peak rate by epoch and step."""

from collections.abc import Callable

Rate = Callable[[int, int], float]
"""Takes the epoch and the step within it, both from zero; returns the factor of the peak rate."""


def paper(epochs: int, warmup_epochs: int) -> Callable[[int], float]:
    """Return the schedule of the published reference, which is constant within an epoch.

    The factor of the first warm-up epoch is zero: weights do not move while running averages settle.
    The reference stops before the last epoch, whose factor would also be zero. Here the factor of that
    epoch is half a decrement: with the learning rate inside the momentum, as in TensorFlow's RMSProp, a
    factor of zero would let the weights move by momentum alone.
    """
    falling = epochs - warmup_epochs

    def factor(epoch: int) -> float:
        if epoch < warmup_epochs:
            return epoch / warmup_epochs
        return max(1 - (epoch + 1 - warmup_epochs) / falling, 0.5 / falling)

    return factor


def linear(steps: int, warmup_steps: int) -> Callable[[int], float]:
    """Return a schedule that rises linearly to one and then falls linearly, step by step.

    The factor reaches zero only after the last step, for the reason given in `paper`.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return (steps - step) / (steps - warmup_steps + 1)

    return factor


def _paper(epochs: int, warmup_epochs: int, steps: int) -> Rate:
    factor = paper(epochs, warmup_epochs)
    return lambda epoch, step: factor(epoch)


def _linear(epochs: int, warmup_epochs: int, steps: int) -> Rate:
    factor = linear(epochs * steps, warmup_epochs * steps)
    return lambda epoch, step: factor(epoch * steps + step)


_SCHEDULES: dict[str, Callable[[int, int, int], Rate]] = {"paper": _paper, "linear": _linear}

NAMES = tuple(_SCHEDULES)


def rate(schedule: str, *, epochs: int, warmup_epochs: int, steps: int) -> Rate:
    """Return the schedule of this name for a number of epochs and of steps per epoch.

    The warm-up takes at most half of the epochs, so that a short run has a decay too.
    """
    return _SCHEDULES[schedule](epochs, min(warmup_epochs, epochs // 2), steps)
