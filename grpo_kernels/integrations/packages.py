"""Import errors for packages that are missing or of an unknown release; they say what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


@contextmanager
def needed(install: str, *packages: str) -> Iterator[None]:
    """Context for imports from `packages`; its errors say ``pip install {install}``.

    Raises:
        ModuleNotFoundError: one of them is not installed.
        ImportError: one of them lacks an imported name, as releases older or newer than those we know may.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ModuleNotFoundError(
                f"expected the package {package}, which is not installed: pip install {install}", name=package
            ) from error
        raise ImportError(
            f"expected a release of {package} that grpo_kernels knows, got {package} {_version(package)}, where an "
            f"import fails ({error}): pip install --upgrade {install}",
            name=error.name,
            path=error.path,
        ) from error


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"
