"""Spans of requests, where OpenTelemetry is installed."""

import http.server
import sys
import threading
import time

import pytest

from configs.errors import InputError
from inference.server.service import Limits
from inference.server.traces import Traces, current
from tests.inference.server.fake_engine import CRASHES, FakeEngine
from tests.inference.server.running import running, wait_until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = [{"role": "user", "content": "my secret"}]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def exporter():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traces(exporter):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    return Traces(SimpleSpanProcessor(exporter))


@pytest.fixture(scope="module")
def server(traces):
    with running(FakeEngine(), traces=traces) as one:
        yield one


def the_span(exporter):
    wait_until(exporter.get_finished_spans)
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    return span


def test_a_request_has_a_span_with_what_was_asked_and_came(server, exporter):
    exporter.clear()
    body = {"messages": ASKED, "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 0,
            "n": 2, "stop": ["my stop"], "user": "somebody"}  # fmt: skip
    assert server.post(CHAT, **body).status_code == 200
    span = the_span(exporter)
    assert span.name == "chat fake" and span.kind.name == "SERVER" and span.parent is None
    found = dict(span.attributes)
    prompt = server.post("/tokenize", messages=ASKED).json()["count"]
    assert found == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "ridgeline",
        "gen_ai.request.model": "fake", "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.seed": 0, "gen_ai.request.choice.count": 2,
        "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": 10,
        "http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200,
    }  # fmt: skip
    (event,) = span.events
    assert event.name == "gen_ai.first_token" and span.start_time < event.timestamp < span.end_time
    text = span.to_json()
    assert "my" not in text and "somebody" not in text
    assert span.resource.attributes["service.name"] == "ridgeline"
    assert not span.status.status_code.value  # unset


def test_a_stream_belongs_to_the_trace_of_its_sender(server, exporter):
    exporter.clear()
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    response = server.http.post(TEXT, json=body, headers={"traceparent": PARENT})
    assert response.status_code == 200
    span = the_span(exporter)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    body = server.http.post(TEXT, json=body, headers={"traceparent": "00-nonsense"})
    assert the_span(exporter).parent is None


def test_what_its_sender_does_not_sample_has_no_span(server, exporter):
    exporter.clear()
    headers = {"traceparent": PARENT[:-1] + "0"}
    assert server.http.post(TEXT, json={"prompt": "a"}, headers=headers).status_code == 200
    for path in ("/health", "/metrics", "/v1/models", "/none"):
        server.http.get(path)
    assert exporter.get_finished_spans() == ()


def test_errors_are_in_the_span(exporter):
    exporter.clear()
    with running(FakeEngine(0.02), Limits(request_s=1), traces=fresh(exporter)) as one:
        assert one.post(TEXT, prompt="a", max_tokens=400, stream=True).status_code == 200
        span = the_span(exporter)
        assert span.attributes["error.type"] == "stream_error"
        assert span.status.status_code.name == "ERROR"
        assert one.post(TEXT, prompt="a", temperature=9).status_code == 400
        span = the_span(exporter)
        assert "error.type" not in span.attributes  # it was the client's
        assert span.attributes["http.response.status_code"] == 400
        assert span.name == "text_completion" and not span.events
    with running(FakeEngine(), traces=fresh(exporter)) as one:
        assert one.post(TEXT, prompt=[CRASHES]).status_code == 500
        span = the_span(exporter)
        assert span.attributes["error.type"] == "500" and "/some/path" not in span.to_json()
    current().failed("nobody listens")


def fresh(exporter):
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    exporter._stopped = False  # by the server before
    return Traces(SimpleSpanProcessor(exporter))


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is sent to it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_spans_are_sent_to_a_collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.received = []
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/"
        with running(FakeEngine(), traces=Traces.sent_to("--otlp_endpoint", endpoint)) as one:
            assert one.post(TEXT, prompt="a", max_tokens=2).status_code == 200
            assert collector.received == []  # they go in batches
        ((path, kind, body),) = collector.received
        collector.shutdown()
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    sent = ExportTraceServiceRequest.FromString(body)
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert span.name == "text_completion fake"


@pytest.mark.timing
def test_a_collector_that_is_not_there_holds_nobody_up(exporter):
    with running(traces=Traces.sent_to("x", "http://127.0.0.1:9")) as one:
        start = time.perf_counter()
        assert one.post(TEXT, prompt="a", max_tokens=2).status_code == 200
        assert time.perf_counter() - start < 2
        start = time.perf_counter()
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://a:1", "http://", "http://a?b"])
def test_an_address_is_checked(endpoint):
    with pytest.raises(InputError, match="--otlp_endpoint=.* is the address of a collector"):
        Traces.sent_to(f"--otlp_endpoint={endpoint}", endpoint)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(InputError, match=r"pip install '\.\[otel\]'"):
        Traces.sent_to("--otlp_endpoint", "http://localhost:4318")
