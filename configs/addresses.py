"""Names of machines, as flags and settings write them."""


def is_name(address: str) -> bool:
    """Whether a socket takes it for the name of a host, which need not exist."""
    try:
        return bool(address.encode("idna")) and address.isprintable()
    except UnicodeError:
        return False
