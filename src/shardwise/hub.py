"""Whether the model hub can be reached, asked once and fast."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def hub_answers() -> bool:
    """Whether the hub's host name resolves, or a proxy will look it up: without it huggingface_hub retries for half a minute a file."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
