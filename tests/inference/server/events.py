"""Server-sent events as a client reads them."""

import json


def read(text: str) -> list[dict]:
    """All events but the last, which says that it is the last."""
    assert text.endswith("\n\n")
    found = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") and "\n" not in line for line in found), text
    assert found[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in found[:-1]]


def choices(events: list[dict], index: int = 0) -> list[dict]:
    return [c for event in events for c in event.get("choices", ()) if c["index"] == index]
