"""wandb's mode (online, offline, none), decided with its reason before wandb is imported.

Owns the search for credentials and the probe of the server, both within a time limit. Imports no tracker, and
checks only that a key exists.
"""

from __future__ import annotations

import configparser
import netrc
import os
import shlex
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from launcher.config.messages import tool
from launcher.config.schema import TrackerConfig

PROBE_S = 2.0  # wandb itself takes 18 s to find out that a server cannot be reached, with init_timeout=8
DEFAULT_SERVER = "https://api.wandb.ai"
NO_KEY = "no API key"

Probe = Callable[[str], str | None]  # server URL -> why it cannot be used, or None


@dataclass(frozen=True)
class Decision:
    """The mode of the tracker, and the reason."""

    mode: str  # online, offline, none
    reason: str

    @property
    def text(self) -> str:
        return f"{self.mode}: {self.reason}"


def decide(tracker: TrackerConfig, environ: Mapping[str, str], probe: Probe | None = None) -> Decision:
    """Decide the mode. Takes at most `PROBE_S` seconds, and none if the config or a missing key decides it.

    An explicit mode in the config takes precedence over WANDB_MODE. In every mode, a server that cannot be
    used means offline: tracking never stops a run.
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
    trouble = (probe or probe_server)(server)
    if trouble is not None:
        return Decision("offline", f"{server} {trouble}")
    return Decision("online", f"API key from {source}, {server} answers")


def sync_command(directory: Path) -> str:
    """The command that uploads an offline run."""
    return f"{tool('wandb')} sync {shlex.quote(str(directory / 'wandb'))}/offline-run-*"


def probe_server(server: str, timeout_s: float = PROBE_S) -> str | None:
    """Request one page without credentials. Returns the problem, or None after any HTTP response."""
    outcome: list[str | None] = []
    # In a thread: no timeout covers name resolution or a server that responds byte by byte.
    thread = threading.Thread(target=lambda: outcome.append(_ask(server, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return outcome[0] if outcome else f"did not answer within {timeout_s:g} s"


def _ask(server: str, timeout_s: float) -> str | None:
    import http.client
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"{server.rstrip('/')}/healthz", timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return None  # a server that refuses this page is reachable
    except TimeoutError:
        return f"did not answer within {timeout_s:g} s"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"cannot be reached: {error.reason if isinstance(error, urllib.error.URLError) else error}"


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
