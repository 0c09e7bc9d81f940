"""The progress that Kubeflow Trainer shows: what is posted, with which token, and servers that fail."""

import contextlib
import json
import shutil
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launcher.telemetry.kubeflow import CA_CERT, TOKEN, URL, Timing, TrainJobProgress
from launcher.telemetry.stream import Telemetry
from tests.telemetry.made import made
from tests.telemetry.tracker.http_server import closed_port

QUICK = Timing(every_s=0.01, answer_s=30, last_s=30, lost_s=30)
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/default/trainjobs/mine/status"


class Controller(ThreadingHTTPServer):
    """Keeps the tokens and the bodies of what is posted; answers with `status`, and nothing while `hangs`."""

    def __init__(self, context=None):
        super().__init__(("127.0.0.1", 0), Handler)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if context else ''}://127.0.0.1:{self.server_port}{PATH}"
        self.status, self.posts, self.goes_on = 200, [], threading.Event()
        self.goes_on.set()

    def handle_error(self, request, client_address):
        """A client that has left is no error."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == PATH
        assert self.headers["Content-Type"] == "application/json"
        self.server.posts.append((self.headers["Authorization"], body["trainerStatus"]))
        self.server.goes_on.wait(60)
        self.send_response(self.server.status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_): ...


@contextlib.contextmanager
def serving(context=None):
    with Controller(context) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.goes_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


def await_true(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def progress_to(url, token, timing=QUICK, **more):
    warnings = []
    return TrainJobProgress({URL: url, TOKEN: str(token), **more}, warnings.append, timing), warnings


def test_percentage_remaining_seconds_and_metrics_are_posted_and_the_token_is_read_again(token):
    with serving() as server:
        sink, warnings = progress_to(server.url, token)
        sink.write(made("start", 0, total_steps=200))
        sink.advance(0, 9)
        await_true(lambda: server.posts and server.posts[-1][1].get("progressPercentage") == 4)
        token.write_text("second")
        sink.write(made("step", 50, epoch=0, loss=0.25, lr=0.1, scale=65536.0, step_ms=3.0))
        sink.write(made("eval", 50, epoch=0, loss=0.5, accuracy=0.75))
        await_true(lambda: "eval/accuracy" in str(server.posts[-1][1]["metrics"]))
        before = server.posts[-1][1]
        sink.advance(0, 200)
        await_true(lambda: server.posts[-1][1]["progressPercentage"] == 99)  # not yet evaluated and saved
        sink.write(made("end", 200, state="done", exit=0))
        sink.close()
    assert (server.posts[0][0], server.posts[-1][0]) == ("Bearer first", "Bearer second")
    assert before["progressPercentage"] == 25
    assert isinstance(before["estimatedRemainingSeconds"], int)
    values = {metric["name"]: metric["value"] for metric in before["metrics"]}
    assert (values["train/loss"], values["eval/accuracy"], values["scale/value"]) == ("0.25", "0.75", "65536")
    assert not any(name.startswith("time/") for name in values)
    assert all(isinstance(value, str) for value in values.values())
    last = server.posts[-1][1]
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    assert time.strptime(last["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%S%z")
    assert warnings == []


def test_the_pace_holds_however_many_steps_there_are_and_the_last_state_is_posted(token):
    with serving() as server:
        sink, _ = progress_to(server.url, token, Timing(every_s=3600, lost_s=30))
        sink.write(made("start", 0, total_steps=1000))
        for step in range(1, 501):
            sink.advance(0, step)
        sink.write(made("end", 500, state="preempted", exit=75))
        sink.close()
    assert [status["progressPercentage"] for _, status in server.posts] == [50]


@pytest.mark.parametrize("status", [302, 403, 500])
def test_a_server_that_refuses_is_one_warning_and_is_asked_again(token, status):
    with serving() as server:
        server.status = status
        sink, warnings = progress_to(server.url, token)
        for step in range(1, 4):
            sink.advance(0, step)
            await_true(lambda count=step: len(server.posts) >= count)
        sink.close()
    assert len(warnings) == 1
    assert str(status) in warnings[0]


@pytest.mark.parametrize("lacks", ["server", "token"])
def test_without_a_server_or_a_token_the_run_continues_with_one_warning(tmp_path, token, lacks):
    url = f"http://127.0.0.1:{closed_port()}{PATH}"
    sink, warnings = progress_to(url, token if lacks == "server" else tmp_path / "absent")
    await_true(lambda: warnings)
    sink.advance(0, 2)
    sink.close()
    assert len(warnings) == 1
    assert ("refused" if lacks == "server" else "absent") in warnings[0]


def test_a_server_that_hangs_or_dies_delays_no_step_and_not_the_end(token):
    with serving() as server:
        server.goes_on.clear()
        telemetry = Telemetry()
        warnings = []
        sink = TrainJobProgress(
            {URL: server.url, TOKEN: str(token)},
            warnings.append,
            Timing(every_s=0.01, answer_s=60, last_s=0.2),
        )
        telemetry.add(sink)
        await_true(lambda: server.posts)
        for step in range(1000):
            telemetry.advance(0, step)
        telemetry.emit(made("end", 1000, state="done", exit=0))
        began = time.monotonic()
        telemetry.close()
        assert time.monotonic() - began < 30  # of the 60 that the server would be waited for
        assert len(warnings) == 1
        assert "in time" in warnings[0]
    sink._thread.join(60)  # the server has died
    assert not sink._thread.is_alive()
    assert len(warnings) == 1


@pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl, which makes a certificate, is not installed"
)
def test_only_the_authority_of_the_controller_is_trusted_and_no_token_goes_elsewhere(token, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-subj", "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(context) as server:
        sink, warnings = progress_to(server.url, token)
        await_true(lambda: warnings)
        sink.close()
        assert "certificate" in warnings[0].lower()
        assert server.posts == []
        sink, warnings = progress_to(server.url, token, **{CA_CERT: str(certificate)})
        await_true(lambda: server.posts)
        sink.close()
    assert warnings == []
    assert server.posts[0][0] == "Bearer first"
