"""Where the workers run: threads of this process, or Ray actors.

Importing this package imports no Ray.
"""

from piper.backends.base import BACKENDS, Backend
from piper.backends.inprocess import InProcessBackend
from piper.errors import ConfigError

__all__ = ["BACKENDS", "Backend", "InProcessBackend", "make_backend"]


def _ray(**options: object) -> Backend:
    from piper.backends.ray import RayBackend  # noqa: PLC0415 (only who asks for Ray needs it)

    return RayBackend(**options)  # type: ignore[arg-type]  # the user's keywords


BACKENDS.add("inprocess", InProcessBackend)
BACKENDS.add("ray", _ray)


def make_backend(backend: str | Backend, **options: object) -> Backend:
    """The backend of that name, with its keyword options; one that was made already is returned as
    it is. Raises :class:`ConfigError` for anything else.
    """
    if not isinstance(backend, (str, Backend)):
        raise ConfigError(
            f"a backend is {' or '.join(map(repr, sorted(BACKENDS)))}, or one that was made, found {type(backend).__name__}: {backend!r:.80}"
        )
    if not isinstance(backend, str):
        return backend
    return BACKENDS[backend](**options)
