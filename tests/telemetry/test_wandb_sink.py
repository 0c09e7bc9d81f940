"""What is decided about the tracker, and why, with real files and real loopback servers."""

import contextlib
import socket
import threading
import time

import pytest

from launcher.config.schema import TrackerConfig
from launcher.telemetry.tracker.mode import NO_KEY, decide, probe_server
from launcher.telemetry.tracker.wandb_sink import history_row, new_run_id
from tests.run_dir.test_records import CANARY

UP, DOWN = (lambda server: None), (lambda server: "is down")


def tracker(name="wandb", mode="auto"):
    return TrackerConfig(
        name=name, project="launcher", mode=mode, group=None, tags=(), entity=None, run_name=None, run_id=None
    )


def never(server):
    raise AssertionError("no probe is needed to decide this")


@pytest.mark.parametrize(
    ("config", "environ", "probe", "mode", "reason"),
    [
        (tracker(), {}, never, "offline", NO_KEY),
        (tracker(), {"WANDB_API_KEY": ""}, never, "offline", NO_KEY),
        (tracker(), {"WANDB_API_KEY": CANARY}, UP, "online", "API key from WANDB_API_KEY"),
        (tracker(), {"WANDB_API_KEY": CANARY}, DOWN, "offline", "https://api.wandb.ai is down"),
        (
            tracker(),
            {"WANDB_API_KEY": CANARY, "WANDB_BASE_URL": "http://x"},
            DOWN,
            "offline",
            "http://x is down",
        ),
        (
            tracker(),
            {"WANDB_API_KEY": CANARY, "WANDB_MODE": "offline"},
            never,
            "offline",
            "WANDB_MODE=offline",
        ),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "dryrun"}, never, "offline", "WANDB_MODE=dryrun"),
        (
            tracker(),
            {"WANDB_API_KEY": CANARY, "WANDB_MODE": "disabled"},
            never,
            "none",
            "WANDB_MODE=disabled",
        ),
        (
            tracker(),
            {"WANDB_API_KEY": CANARY, "WANDB_DISABLED": "true"},
            never,
            "none",
            "WANDB_DISABLED=true",
        ),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "online"}, UP, "online", "API key"),
        (tracker(mode="offline"), {"WANDB_API_KEY": CANARY}, never, "offline", "tracker.mode=offline"),
        (tracker(mode="online"), {"WANDB_MODE": "disabled"}, never, "offline", NO_KEY),
        (tracker(mode="online"), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "offline"}, UP, "online", "API key"),
        (tracker(name="none"), {"WANDB_API_KEY": CANARY}, never, "none", "tracker=none"),
        (tracker(mode="none"), {"WANDB_API_KEY": CANARY}, never, "none", "tracker=none"),
    ],
)
def test_the_mode_is_decided_with_its_reason(tmp_path, config, environ, probe, mode, reason):
    decision = decide(config, {"HOME": str(tmp_path), **environ}, probe)
    assert decision.mode == mode
    assert reason in decision.text
    assert CANARY not in decision.text


@pytest.mark.parametrize(
    ("file", "text", "environ"),
    [
        (".netrc", f"machine api.wandb.ai login user password {CANARY}\n", {}),
        ("_netrc", f"machine api.wandb.ai login user password {CANARY}\n", {}),
        ("my.netrc", f"machine own.server:8080 login user password {CANARY}\n", {"NETRC": "my.netrc"}),
        (".config/wandb/settings", f"[default]\napi_key = {CANARY}\n", {}),
        ("conf/settings", f"[default]\napi_key = {CANARY}\n", {"WANDB_CONFIG_DIR": "conf"}),
    ],
)
def test_a_login_of_an_earlier_day_counts_as_a_key(tmp_path, file, text, environ):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    places = {name: str(tmp_path / value) for name, value in environ.items()}
    if file == "my.netrc":
        places["WANDB_BASE_URL"] = "http://own.server:8080"
    decision = decide(tracker(), {"HOME": str(tmp_path), **places}, UP)
    assert decision.mode == "online"
    assert CANARY not in decision.text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (".netrc", "machine other.server login user password secret\n"),
        (".netrc", "this is no netrc ("),
        (".config/wandb/settings", "no section"),
        (".config/wandb/settings", "[default]\nentity = me\n"),
    ],
)
def test_files_without_a_key_or_sense_mean_none(tmp_path, file, text):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert decide(tracker(), {"HOME": str(tmp_path)}, never).reason == NO_KEY


def test_the_server_of_the_settings_file_is_probed(tmp_path):
    (tmp_path / "settings").write_text(f"[default]\nbase_url = http://own:1\napi_key = {CANARY}\n")
    asked = []
    decide(tracker(), {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}, asked.append)
    assert asked == ["http://own:1"]


class Server:
    """A loopback server. `answer` maps a request's first line to bytes, or to None for no answer at all."""

    def __init__(self, answer):
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.requests = []
        self._thread = threading.Thread(target=self._accept)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.settimeout(5)
                self._open.append(connection)
                request = connection.recv(65536)
                self.requests.append(request)
                answer = self._answer(request.split(b"\r\n")[0])
                if answer is not None:
                    connection.sendall(answer)
                    connection.close()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for connection in self._open:
            connection.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    "answer", [OK, OK.replace(b"200 OK", b"404 Not Found"), OK.replace(b"200 OK", b"500 Oh")]
)
def test_any_http_answer_is_an_answer_and_no_credentials_are_sent(answer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    with Server(lambda _: answer) as server:
        assert probe_server(server.url) is None
    assert len(server.requests) == 1
    assert CANARY.encode() not in server.requests[0]
    assert b"Authorization" not in server.requests[0]


def test_a_closed_port_is_noticed_at_once():
    began = time.monotonic()
    assert "cannot be reached" in probe_server(f"http://127.0.0.1:{closed_port()}")
    assert time.monotonic() - began < 1


def test_a_server_that_accepts_and_never_answers_costs_the_limit_and_no_more():
    with Server(lambda _: None) as server:
        began = time.monotonic()
        assert "did not answer within 0.3 s" in probe_server(server.url, timeout_s=0.3)
        assert 0.2 < time.monotonic() - began < 1


def test_a_server_that_answers_byte_by_byte_costs_no_more_either():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def drip():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while not stop.wait(0.1):
                    connection.sendall(b"H")

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert probe_server(url, timeout_s=0.5) == "did not answer within 0.5 s"
        assert time.monotonic() - began < 1.5
        stop.set()
        thread.join()


@pytest.mark.parametrize("server", ["nonsense", "http://[", "ftp://127.0.0.1:1", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_a_reason_not_a_crash(server):
    assert "cannot be reached" in probe_server(server)


@pytest.mark.parametrize(
    ("record", "row"),
    [
        (
            {"event": "step", "time": 1.0, "step": 5, "epoch": 0, "loss": 0.5, "lr": 0.1, "grad_norm": None}
            | {"scale": 65536.0, "skipped": 1, "samples_per_s": 99.0, "step_ms": 3.0},
            {"step": 5, "train/epoch": 0, "train/loss": 0.5, "train/lr": 0.1, "scale/value": 65536.0}
            | {"scale/skipped": 1, "perf/samples_per_s": 99.0, "perf/step_ms": 3.0},
        ),
        (
            {"event": "eval", "time": 1.0, "step": 9, "loss": 0.2, "accuracy": 0.9},
            {"step": 9, "eval/loss": 0.2, "eval/accuracy": 0.9},
        ),
        (
            {
                "event": "overflow",
                "time": 1.0,
                "step": 2,
                "ranks": [0, 1],
                "parameters": ["a.b"],
                "scale": 8.0,
            },
            {
                "step": 2,
                "scale/overflow_ranks": "0, 1",
                "scale/overflow_parameters": "a.b",
                "scale/value": 8.0,
            },
        ),
        ({"event": "gpu", "time": 1.0, "step": 2, "power_w": 300.0}, {"step": 2, "gpu/power_w": 300.0}),
        ({"event": "warning", "time": 1.0, "step": 2, "text": "x"}, {}),
        ({"event": "end", "time": 1.0, "step": 2, "state": "done"}, {}),
    ],
)
def test_events_appear_under_grouped_names(record, row):
    assert history_row(record) == row


def test_run_ids_are_what_wandb_takes():
    ids = {new_run_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(
        (len(run_id) == 8 and run_id.isalnum() and run_id.islower()) or run_id.isdigit() for run_id in ids
    )
