"""wandb's mode (online, offline, none), decided with its reason before wandb is imported.

Owns the search for credentials. Imports no tracker, and checks only that a key exists: that a server does not
answer is found in the tracker's thread, which then continues offline.
"""

from __future__ import annotations

import configparser
import netrc
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.messages import tool
from launcher.config.schema import TrackerConfig

DEFAULT_SERVER = "https://api.wandb.ai"
NO_KEY = "no API key"


@dataclass(frozen=True)
class Decision:
    """The mode of the tracker, and the reason."""

    mode: str  # online, offline, none
    reason: str

    @property
    def text(self) -> str:
        return f"{self.mode}: {self.reason}"


def decide(tracker: TrackerConfig, environ: Mapping[str, str]) -> Decision:
    """Decide the mode. An explicit one in the config takes precedence over WANDB_MODE.

    In every mode, a missing key means offline: tracking never stops a run.
    """
    asked = Decision(tracker.mode, f"tracker.mode={tracker.mode}")
    settled = _mode_of(environ) if tracker.mode == "auto" else asked
    if settled is not None and settled.mode != "online":
        return settled
    settings = _settings_file(environ)
    server = environ.get("WANDB_BASE_URL") or settings.get("base_url") or DEFAULT_SERVER
    source = _key_source(environ, settings, server)
    if source is None:
        return Decision("offline", f"{NO_KEY}; {tool('wandb')} login stores one")
    return Decision("online", f"API key from {source}")


def sync_command(directory: Path) -> str:
    """The command that uploads an offline run."""
    return f"{tool('wandb')} sync {shlex.quote(str(directory / 'wandb'))}/offline-run-*"


def _mode_of(environ: Mapping[str, str]) -> Decision | None:
    """The mode of wandb's own variables; None if they set no known mode."""
    if environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes"):
        return Decision("none", f"WANDB_DISABLED={environ['WANDB_DISABLED']}")
    asked = environ.get("WANDB_MODE", "")
    mode = {"disabled": "none", "offline": "offline", "dryrun": "offline"}.get(asked)
    return None if mode is None else Decision(mode, f"WANDB_MODE={asked}")


def _key_source(environ: Mapping[str, str], settings: Mapping[str, str], server: str) -> str | None:
    """Where the tracker will find credentials, in its own order of search; None if nowhere."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if environ.get(variable):
            return variable
    if settings.get("api_key") or settings.get("identity_token_file"):
        return "the wandb settings file"
    given = os.path.expanduser(environ.get("NETRC", ""))
    files = [Path(given)] if given else [_home(environ) / name for name in (".netrc", "_netrc")]
    return next((str(path) for path in files if _knows(path, server)), None)


def _knows(path: Path, server: str) -> bool:
    try:
        return netrc.netrc(path).authenticators(urlsplit(server).netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _settings_file(environ: Mapping[str, str]) -> dict[str, str]:
    config_dir = environ.get("WANDB_CONFIG_DIR")
    directory = Path(os.path.expanduser(config_dir)) if config_dir else _home(environ) / ".config" / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(directory / "settings", encoding="utf-8")
        return dict(parser["default"]) if parser.has_section("default") else {}
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or os.path.expanduser("~"))
