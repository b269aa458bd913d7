"""A sentence in place of the riddle that an ill-fitting torchvision makes of every transformers import."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version


@contextmanager
def torchvision_mismatch_explained() -> Iterator[None]:
    """Import transformers models inside this: torchvision's own failure is told in words, others pass.

    Raises:
        ImportError: torchvision is installed but built for another torch, so its operators do not register.
    """
    try:
        yield
    except (RuntimeError, ImportError) as error:
        if not _is_torchvision_mismatch(error):
            raise
        raise ImportError(
            f"the installed torchvision {version('torchvision')} was not built for the installed torch "
            f"{version('torch')}, and transformers imports it with every model. Install the pair that "
            "belongs together (pip install --upgrade torch torchvision) or remove torchvision (pip uninstall "
            "torchvision): only the vision models need it."
        ) from error


def _is_torchvision_mismatch(error: BaseException | None) -> bool:
    """Look for torch's message along the causes: transformers wraps it in an error of its own."""
    while error is not None:
        if "operator torchvision::" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
