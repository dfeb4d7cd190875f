"""Spans of requests for OpenTelemetry, by its semantic conventions for generative AI. They contain
no text of a client. Without `--otlp_endpoint`, OpenTelemetry is not loaded.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from configs.errors import InputError
from inference.request import FIELDS, SamplingParams
from inference.server.protocol.responses import Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

# Paths that have spans, by what the conventions call the operation.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/infill": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/score", "/v1/score"), "score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "rerank"),
    **dict.fromkeys(("/classify", "/v1/classify"), "classify"),
}
_PROVIDER = "ridgeline"
_EXPORT_S = 5.0  # for one attempt to send spans, and for all at the end


class Trace:
    """Takes events of a request; this one ignores them."""

    def begin(self, model: str, params: SamplingParams, usage: Usage) -> None:
        """The request goes to the engine; `usage` counts its tokens from here on."""

    def note(self, finish_reason: str | None, queued_s: float = 0.0) -> None:
        """Tokens of an answer came, or its end; `queued_s`: that it waited for the engine."""

    def failed(self, kind: str) -> None:
        """An answer that had begun ended with an error."""


_UNTRACED = Trace()
_current: ContextVar[Trace] = ContextVar("trace", default=_UNTRACED)


def current() -> Trace:
    """The trace of the request that this context serves."""
    return _current.get()


class Traces:
    """Makes spans and passes them to a processor."""

    def __init__(self, processor: "SpanProcessor"):
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        name = os.environ.get("OTEL_SERVICE_NAME", _PROVIDER)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_PROVIDER)

    @classmethod
    def sent_to(cls, label: str, endpoint: str) -> "Traces":
        """Sends spans to a collector by OTLP over HTTP.

        Raises:
            InputError: the address is invalid, or the packages are missing.
        """
        url = urlsplit(endpoint)
        if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment:
            raise InputError(f"{label} is the address of a collector: http://localhost:4318, say")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise InputError(f"{label} needs more packages: pip install '.[otel]'") from None
        target = endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"
        return cls(BatchSpanProcessor(OTLPSpanExporter(endpoint=target, timeout=_EXPORT_S)))

    def has_span(self, handler: str) -> bool:
        return handler in _OPERATIONS

    @contextmanager
    def span(
        self,
        handler: str,
        method: str,
        headers: Iterable[tuple[bytes, bytes]],
        status: Callable[[], int],
    ) -> Iterator[None]:
        """A span around the block, in the trace of the header `traceparent`; `status`: called at
        the end, returns the status of the answer, or 0 if there was none.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in headers
            if name in (b"traceparent", b"tracestate")
        }
        operation = _OPERATIONS[handler]
        span = self._tracer.start_span(
            operation,
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation, "gen_ai.provider.name": _PROVIDER,
                "http.request.method": method, "http.route": handler,
            },
        )  # fmt: skip
        trace = _Spanned(span, operation)
        token = _current.set(trace)
        try:
            yield
        finally:
            _current.reset(token)
            code = status()
            if code:
                span.set_attribute("http.response.status_code", code)
            kind = trace.error or (str(code) if code >= 500 else None if code else "disconnected")
            if kind is not None:
                span.set_attribute("error.type", kind)
                span.set_status(Status(StatusCode.ERROR))
            trace.end()

    def close(self) -> None:
        self._provider.force_flush(int(1000 * _EXPORT_S))
        self._provider.shutdown()


class _Spanned(Trace):
    """Turns events of a request into attributes and events of a span."""

    def __init__(self, span: Any, operation: str):
        self.error: str | None = None
        self._span = span
        self._operation = operation
        self._usage: Usage | None = None
        self._reasons: list[str] = []
        self._has_token = False

    def begin(self, model: str, params: SamplingParams, usage: Usage) -> None:
        self._usage = usage
        span = self._span
        span.update_name(f"{self._operation} {model}")
        span.set_attribute("gen_ai.request.model", model)
        for name, field in FIELDS.items():
            value = getattr(params, name)
            if field.trace and (field.is_traced_always or value != field.default):
                span.set_attribute(f"gen_ai.request.{field.trace}", value)
        span.set_attribute("gen_ai.response.model", model)

    def note(self, finish_reason: str | None, queued_s: float = 0.0) -> None:
        if not self._has_token:
            self._has_token = True
            self._span.add_event("gen_ai.first_token", {"ridgeline.queue_time": queued_s})
        if finish_reason is not None:
            self._reasons.append(finish_reason)

    def failed(self, kind: str) -> None:
        self.error = kind

    def end(self) -> None:
        if self._reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        if self._usage is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", self._usage.prompt_tokens)
            self._span.set_attribute("gen_ai.usage.output_tokens", self._usage.completion_tokens)
        self._span.end()
