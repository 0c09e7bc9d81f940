"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in the user's own YAML and on the command line.

Owns which calls are allowed and the type of their values, which a run records like values that are typed.
Variables named like credentials are refused, and so are all other resolvers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

from launcher.config.schema import rules
from launcher.errors import ConfigError

CALL = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_][A-Za-z0-9_]*)\s*(,[^{}$]*)?\}")
OTHER_CALL = re.compile(r"\$\{\s*[\w.]+\s*:")
CREDENTIAL = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def resolver_problem(text: str) -> str | None:
    """Why the text must not be resolved; None if it may be."""
    if OTHER_CALL.search(CALL.sub("", text)):
        return "configs cannot call resolvers (${name:...}), except ${oc.env:NAME}. Write the value."
    for name, _ in CALL.findall(text):
        if CREDENTIAL.search(name):
            return f"{name} is named like a credential, which no config may hold. Choose another variable."
    return None


def interpolated(key: str, text: object, tree: Mapping[str, object] = {}) -> object:  # read only
    """The value of a key that is not in the tree, with its variables and references to keys of the tree.

    Raises ConfigError for other references.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.create({**tree, key: text})[key]
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={text}: cannot be resolved: {error.msg}.") from error


def typed(path: str, value: object) -> object:
    """A variable's text as the type of its key: 3 is a number for seed, and a string for tracker.group."""
    if not isinstance(value, str):
        return value
    rule = rules().get(path)
    if rule is not None and rule.holds(value):
        return value
    read = _scalar(value)
    return read if rule is None or rule.holds(read) else value


def _scalar(text: str) -> object:
    words = {"null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
