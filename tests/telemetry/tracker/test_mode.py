"""Whether a run is tracked online, offline or not at all, and why: real files, real loopback servers."""

import time

import pytest

from launcher.config.schema import TrackerConfig
from launcher.telemetry.tracker.mode import NO_KEY, decide, probe_server
from tests.limits import at_most
from tests.run_dir.test_records import CANARY
from tests.telemetry.tracker.http_server import OK, Server, closed_port

UP, DOWN = (lambda server: None), (lambda server: "is down")


def tracker(mode="auto"):
    nothing = dict.fromkeys(("group", "entity", "run_name", "run_id", "notes"))
    options = {"project": "launcher", "tags": (), **nothing}
    return TrackerConfig(name="wandb", mode=mode, **options)


def never(server):
    raise AssertionError("no probe is needed to decide this")


@pytest.mark.parametrize(
    ("config", "environ", "probe", "mode", "reason"),
    [
        (tracker(), {}, never, "offline", NO_KEY),
        (tracker(), {"WANDB_API_KEY": CANARY}, UP, "online", "API key from WANDB_API_KEY"),
        (tracker(), {"WANDB_API_KEY": CANARY}, DOWN, "offline", "https://api.wandb.ai is down"),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "dryrun"}, never, "offline", "WANDB_MODE=dryrun"),
        (tracker(), {"WANDB_MODE": "disabled"}, never, "none", "WANDB_MODE=disabled"),
        (tracker(), {"WANDB_DISABLED": "true"}, never, "none", "WANDB_DISABLED=true"),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "online"}, UP, "online", "API key"),
        (tracker(mode="offline"), {"WANDB_API_KEY": CANARY}, never, "offline", "tracker.mode=offline"),
        (tracker(mode="online"), {"WANDB_MODE": "disabled"}, never, "offline", NO_KEY),
        (tracker(mode="online"), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "offline"}, UP, "online", "API key"),
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


def test_the_server_of_the_settings_file_is_probed(tmp_path):
    (tmp_path / "settings").write_text(f"[default]\nbase_url = http://own:1\napi_key = {CANARY}\n")
    asked = []
    decide(tracker(), {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}, asked.append)
    assert asked == ["http://own:1"]


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
    assert "can't encode" in probe_server("http://127.0.0.1/\u00e9")
    assert time.monotonic() - began < at_most(3)


def test_a_server_that_accepts_and_never_answers_costs_the_limit_and_no_more():
    with Server(lambda _: None) as server:
        began = time.monotonic()
        assert "did not answer within 0.3 s" in probe_server(server.url, timeout_s=0.3)
        assert 0.2 < time.monotonic() - began < at_most(3)


@pytest.mark.parametrize("server", ["nonsense", "http://[", "ftp://127.0.0.1:1", "http://127.0.0.1:99999"])
def test_an_address_that_is_none_is_a_reason_not_a_crash(server):
    assert "cannot be reached" in probe_server(server)
