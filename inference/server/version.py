"""The version of this program."""

from importlib import metadata


def version() -> str:
    """The installed version; "clone" if the program runs from its folder."""
    try:
        return metadata.version("ridgeline")
    except metadata.PackageNotFoundError:
        return "clone"
