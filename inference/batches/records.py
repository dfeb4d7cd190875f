"""Results of a batch, a line each as OpenAI has them, and which of them are kept."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from configs.errors import InputError
from inference.batches.lines import BadLine, Line
from inference.files import user_files
from inference.http_client.connections import Answer

Record = dict[str, Any]

_MAX_BYTES = 4 << 30  # of results, which are held at once
_NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
DENIED = (401, 403)  # whoever asks, not what is asked, so another key may be what it takes
_FOR_A_WHILE = (408, 429, *DENIED)  # and from 500 on: another attempt may succeed


def answered(line: Line, answer: Answer) -> Record:
    """What the server said, be it an error."""
    try:
        body = msgspec.json.decode(answer.body)
    except _NO_JSON:
        return failed(line, "invalid_answer", f"status {answer.status} without JSON")
    response = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
        "body": body,
    }
    return _record(line.custom_id, response, None)


def failed(line: Line | BadLine, code: str, why: str) -> Record:
    """Of a request that has no answer."""
    return _record(line.custom_id, None, {"code": code, "message": why})


def bad(line: BadLine) -> Record:
    """Of a line that is no request."""
    return failed(line, "invalid_line", f"line {line.number}: {line.why}")


def is_final(record: Mapping[str, object]) -> bool:
    """Whether asking again would change nothing: there is an answer, or a refusal for good."""
    response = record.get("response")
    if not isinstance(response, dict):
        return False
    status = response.get("status_code")
    return isinstance(status, int) and status < 500 and status not in _FOR_A_WHILE


def is_good(record: Mapping[str, object]) -> bool:
    """Whether there is an answer that is no error."""
    response = record.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def num_tokens(record: Mapping[str, Any]) -> int:
    """Tokens of an answer, as far as it says."""
    try:
        count = record["response"]["body"]["usage"]["completion_tokens"]
    except (LookupError, TypeError):
        return 0
    return count if isinstance(count, int) else 0


def read(path: Path) -> list[Record]:
    """Reads an earlier run's results, but not a last line that is cut off; raises InputError if the
    file is unreadable, or another line is none.
    """
    if not path.exists():
        return []
    *lines, last = user_files.read(str(path), _MAX_BYTES).split(b"\n")
    records = []
    for number, line in enumerate([*lines, last], 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
            if not isinstance(record, dict) or "custom_id" not in record:
                raise ValueError
        except (ValueError, *_NO_JSON):
            if number > len(lines):
                break
            raise InputError(
                f"{path} line {number} is no result of a batch: give another --output, or "
                "--overwrite to start over"
            ) from None
        records.append(record)
    return records


def _record(custom_id: str | None, response: Record | None, error: Record | None) -> Record:
    id = f"batch_req_{secrets.token_hex(12)}"
    return {"id": id, "custom_id": custom_id, "response": response, "error": error}
