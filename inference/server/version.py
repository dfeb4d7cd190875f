"""Which version of this program runs."""

from importlib import metadata


def version() -> str:
    """As it was installed; "clone" where it runs from its folder."""
    try:
        return metadata.version("ridgeline")
    except metadata.PackageNotFoundError:
        return "clone"
