"""How a server of models is named in a configuration: an address without secrets, and where its key is found."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def _plain_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http or https address, e.g. http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("must hold no name, password or query; keys come from the environment (api_key_env)")
    return value.rstrip("/")


def _variable_name(value: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", value):
        raise ValueError("must be the NAME of an environment variable, in capitals; never the key itself")
    return value


ServerUrl = Annotated[str, AfterValidator(_plain_url)]
"""An http or https address without name, password or query."""
KeyName = Annotated[str, AfterValidator(_variable_name)]
"""The name of the environment variable that holds a key."""
