"""Whether the Hugging Face hub answers: without a network its client retries for long."""

from __future__ import annotations

import socket
import urllib.parse
import urllib.request

PROBE_TIMEOUT_S = 5.0


def hub_answers() -> bool:
    """Whether the hub, or a mirror that HF_ENDPOINT names, can be connected to; not in offline mode."""
    import huggingface_hub

    constants = huggingface_hub.constants
    return not constants.HF_HUB_OFFLINE and reachable(constants.ENDPOINT)


def reachable(url: str) -> bool:
    """Whether the server of a URL can be connected to, or is behind a proxy."""
    parts = urllib.parse.urlsplit(url)
    if urllib.request.getproxies().get(parts.scheme):
        return True  # the proxy resolves the name
    try:
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(address, timeout=PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True
