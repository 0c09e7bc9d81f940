"""The packages that only some data sets need, and whether the Hugging Face hub answers.

Each is imported where it is used; without one, the error has the line that installs it.
"""

from __future__ import annotations

import logging
import os
import socket
import urllib.parse
import urllib.request
from importlib import import_module
from types import ModuleType

from launcher.config.messages import install_line
from launcher.errors import PreflightError

PROBE_TIMEOUT_S = 5.0  # of a connection to the hub, which answers within a second where there is a network


def optional(name: str, needed: str = "this recipe needs") -> ModuleType:
    """Import a package. Raises PreflightError, which begins with `needed`, where it is not installed."""
    # Once `tokenizers` has started threads of its own, it warns of every fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return import_module(name)
    except ImportError as error:
        raise PreflightError(
            f"{needed} the `{name}` package, which is not installed: {install_line(name)}"
        ) from error


def datasets_library() -> ModuleType:
    """`datasets`, silenced. Raises PreflightError where it is not installed."""
    datasets = optional("datasets")
    datasets.utils.logging.set_verbosity(logging.CRITICAL)  # failures are raised instead
    datasets.disable_progress_bars()
    return datasets


def go_offline_if_unreachable(datasets: ModuleType) -> None:
    """Without a network the hub's client retries for 24 s; in offline mode it uses its cache at once."""
    import huggingface_hub

    if not hub_answers():
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def hub_answers() -> bool:
    """Whether the hub, or a mirror that HF_ENDPOINT names, can be connected to; not in offline mode."""
    import huggingface_hub

    constants = huggingface_hub.constants
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies().get(url.scheme):
        return True  # the proxy resolves the name
    try:
        address = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
