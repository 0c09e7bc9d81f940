"""`${oc.env:NAME}` and `${oc.env:NAME,default}` in the user's own YAML and on the command line.

Owns which calls are allowed and what is recorded for them. The run uses the value; config.yaml,
overrides.txt, the tracker and the report get the text that names the variable. Calls are resolved on the
command line and in --config-dir only: the config of a checkpoint or of an earlier run
is compared, never resolved. Variables named like credentials are refused, and so are all other resolvers.
A resumed run resolves again; its checkpoints hold the values that identify it (seed, names, batch size), so
different ones are refused. Two kinds of value are visible: paths, in messages about their files, and wandb's
own keys, in wandb.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from typing import Any

from launcher.config.schema import rules
from launcher.config.trees import leaves, texts
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


def refuse_missing(unresolved: Mapping[str, object]) -> None:
    """Raises ConfigError for a variable that is not set and has no default."""
    for path, value in leaves(unresolved):
        for text in texts(value):
            for name, default in CALL.findall(text):
                if not default and name not in os.environ:
                    advice = f"Set it, or give a default: ${{oc.env:{name},default}}."
                    raise ConfigError(f"{path}={text}: the environment variable {name} is not set. {advice}")


def escaped(value: object) -> Any:
    """The value with each call escaped, so that resolving leaves its text unchanged."""
    if isinstance(value, str):
        return CALL.sub(lambda call: f"\\{call[0]}", value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list) else value


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


def typed(path: str, value: object, recorded: object) -> object:
    """A variable's text as the type of its key: 3 is a number for seed, and a string for tracker.group."""
    if not isinstance(value, str) or not CALL.fullmatch(str(recorded)):
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
