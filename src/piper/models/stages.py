"""What the models share: checks of sizes, and layers dealt out to pipeline stages."""

from piper.errors import ConfigError
from piper.limits import MAX_LAYERS, MAX_WIDTH


def require_positive(owner: str, **sizes: int) -> None:
    """Raise ``ConfigError`` naming *owner* and the first of *sizes* that is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{owner}.{name}: expected an integer >= 1, found {size}")
        most = MAX_LAYERS if name in ("num_layers", "num_stages") else MAX_WIDTH
        if size > most:
            raise ConfigError(f"{owner}.{name}: expected at most {most}, found {size!r:.40}")


def require_probability(owner: str, name: str, value: float) -> None:
    """Raise ``ConfigError`` unless 0 <= *value* < 1."""
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{owner}.{name}: expected 0 <= {name} < 1, found {value}")


def require_layers(num_layers: int, num_stages: int) -> None:
    """Raise ``ConfigError`` unless each of *num_stages* stages can have one of *num_layers*
    layers.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} stages cannot share {num_layers} layers: each needs at least one; "
            f"use num_layers >= {num_stages} or num_stages <= {num_layers}"
        )


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Deal *num_layers* consecutive layers to *num_stages* stages, sizes differing by one at most.

    The earlier stages take the extra layers, since the last one also computes the loss.
    ``stage_layers(7, 3)`` is ``(range(0, 3), range(3, 5), range(5, 7))``. There must be as many
    layers as stages, see :func:`require_layers`.
    """
    least, extra = divmod(num_layers, num_stages)
    bounds = [stage * least + min(stage, extra) for stage in range(num_stages + 1)]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))
