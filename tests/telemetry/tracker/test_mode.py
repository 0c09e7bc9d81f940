"""Whether a run is tracked online, offline or not at all, and why: real files."""

import pytest

from launcher.config.schema import TrackerConfig
from launcher.telemetry.tracker.mode import NO_KEY, decide
from tests.run_dir.test_records import CANARY


def tracker(mode="auto"):
    nothing = dict.fromkeys(("group", "entity", "run_name", "run_id", "notes"))
    options = {"project": "launcher", "tags": (), **nothing}
    return TrackerConfig(name="wandb", mode=mode, **options)


@pytest.mark.parametrize(
    ("config", "environ", "mode", "reason"),
    [
        (tracker(), {}, "offline", NO_KEY),
        (tracker(), {"WANDB_API_KEY": CANARY}, "online", "API key from WANDB_API_KEY"),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "dryrun"}, "offline", "WANDB_MODE=dryrun"),
        (tracker(), {"WANDB_MODE": "disabled"}, "none", "WANDB_MODE=disabled"),
        (tracker(), {"WANDB_DISABLED": "true"}, "none", "WANDB_DISABLED=true"),
        (tracker(), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "online"}, "online", "API key"),
        (tracker(mode="offline"), {"WANDB_API_KEY": CANARY}, "offline", "tracker.mode=offline"),
        (tracker(mode="online"), {"WANDB_MODE": "disabled"}, "offline", NO_KEY),
        (tracker(mode="online"), {"WANDB_API_KEY": CANARY, "WANDB_MODE": "offline"}, "online", "API key"),
    ],
)
def test_the_mode_is_decided_with_its_reason(tmp_path, config, environ, mode, reason):
    decision = decide(config, {"HOME": str(tmp_path), **environ})
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
    decision = decide(tracker(), {"HOME": str(tmp_path), **places})
    assert decision.mode == "online"
    assert CANARY not in decision.text


def test_the_key_is_that_of_the_server_of_the_settings_file(tmp_path):
    (tmp_path / "settings").write_text("[default]\nbase_url = http://own:1\n")
    environ = {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}
    for server, mode in (("api.wandb.ai", "offline"), ("own:1", "online")):
        (tmp_path / ".netrc").write_text(f"machine {server} login user password {CANARY}\n")
        assert decide(tracker(), environ).mode == mode
