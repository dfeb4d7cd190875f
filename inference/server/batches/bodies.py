"""Files and batches as clients send and get them, in OpenAI's shape."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

ENDPOINTS = (  # what a batch may call, all of its lines the same
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/responses",
    "/v1/messages",
)
WINDOW = "24h"  # the time in which a batch is answered
LIFETIME_S = 30 * 24 * 3600  # of a file, unless its client says less
MIN_LIFETIME_S = 3600
_MAX_LABELS = 16

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Labels = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=_MAX_LABELS),
]
Lifetime = Annotated[int, Meta(ge=MIN_LIFETIME_S, le=LIFETIME_S)]
ENDED = ("completed", "failed", "expired", "cancelled")


class FileForm(Struct):
    """An upload: a form, `multipart/form-data`.

    Attributes:
        file: requests of a batch, one a line.
        purpose: `batch`.
        expires_after: `expires_after[anchor]` and `expires_after[seconds]`; 30 days without it.
    """

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after: "ExpiresAfter | None" = None


class FileBody(Struct):
    """A file.

    Attributes:
        bytes: its size.
        created_at, expires_at: seconds since 1970.
        filename: as the client named it, or made of its id.
        purpose: `batch` of an upload, `batch_output` of results and of errors.
    """

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileList(Struct):
    """Files; `has_more`: others follow `last_id`."""

    data: list[FileBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class DeletedFile(Struct):
    """The id of a file that is deleted."""

    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class NoQuery(Struct):
    """The query of a path that takes none."""


class FileQuery(Struct):
    """Which files are listed.

    Attributes:
        after: id of the last file of the part before.
        limit: files at most.
        order: by the time of creation; `desc`: the newest first.
        purpose: of all files of the list.
    """

    after: Id | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Literal["batch", "batch_output"] | None = None


class BatchQuery(Struct):
    """Which batches are listed, the newest first.

    Attributes:
        after: id of the last batch of the part before.
        limit: batches at most.
    """

    after: Id | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


class ExpiresAfter(Struct):
    """When a file expires: `seconds` after it is created."""

    seconds: Lifetime
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(Struct):
    """A batch.

    Attributes:
        input_file_id: an uploaded file of requests.
        endpoint: the path that all of its lines name.
        completion_window: time after which requests without an answer expire.
        output_expires_after: of the files of results and errors; 30 days without it.
    """

    input_file_id: Id
    endpoint: Annotated[str, Meta(max_length=64, extra_json_schema={"enum": ENDPOINTS})]
    completion_window: Annotated[str, Meta(max_length=16, extra_json_schema={"enum": [WINDOW]})]
    metadata: Labels | None = None
    output_expires_after: ExpiresAfter | None = None


class LineError(Struct):
    """What is wrong with a file of requests, in which line and field."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class LineErrors(Struct):
    """The first errors of a file of requests."""

    data: list[LineError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    """Numbers of requests: all, those in the output file, those in the error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


Status = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip


class BatchBody(Struct):
    """A batch. Times are seconds since 1970.

    Attributes:
        id, endpoint, input_file_id, completion_window, metadata, object: of its creation.
        status: where it stands; the times say since when.
        created_at, in_progress_at, finalizing_at, cancelling_at: times of the first states.
        completed_at, failed_at, expired_at, cancelled_at: time of its end.
        expires_at: after this time no request of it is answered.
        output_file_id, error_file_id: files of results and errors, once it has ended.
        errors: why it failed.
        request_counts: how many requests are done.
    """

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: Status = "validating"
    metadata: dict[str, str] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: LineErrors | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    object: Literal["batch"] = "batch"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchList(Struct):
    """Batches; `has_more`: others follow `last_id`."""

    data: list[BatchBody]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"
