"""What `wandb agent` gives to a process that it starts: the id of a sweep, and values with their types.

The agent writes Python's `str` of each value on the command line, which Hydra reads otherwise or not at all:
None, dictionaries, quotes, brackets. The values themselves are in a YAML file that a variable names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from launcher.config.messages import literal
from launcher.errors import ConfigError


def sweep_of_agent(environ: Mapping[str, str]) -> str:
    """The id of the sweep whose `wandb agent` has started this process; empty without one."""
    return environ.get("WANDB_SWEEP_ID", "") if environ.get("WANDB_SWEEP_PARAM_PATH") else ""


def with_typed_values(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The arguments, with what the agent has written in Hydra's syntax, in place of Python's.

    Other arguments stay as they are.
    """
    if not sweep_of_agent(environ):
        return list(argv)
    values = _values(environ["WANDB_SWEEP_PARAM_PATH"])
    words = {f"{key}={value}": list(overrides(key, value)) for key, value in values.items()}
    # It writes key=value, --key=value, +key=value or ++key=value, as the sweep's `command` says.
    return [found for word in argv for found in words.get(word.lstrip("+-"), [word])]


def _values(path: str) -> dict[str, object]:
    import yaml

    with open(path, encoding="utf-8") as file:
        found = yaml.safe_load(file)
    # Beside the parameters the file has the version of its format.
    return {key: item["value"] for key, item in found.items() if isinstance(item, dict)}


def refuse_sweep(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a sweep in a process that is one job of wandb's sweep."""
    if sweep := sweep_of_agent(environ):
        raise ConfigError(
            f"-m under wandb agent (sweep {sweep}): the agent starts a run with one id for each set of "
            "values, and several jobs here would share it. Leave -m out, and list the values under "
            "`parameters` of wandb's sweep; or sweep with -m and without the agent."
        )


def overrides(key: str, value: object) -> Iterator[str]:
    """The value as overrides: one for each key of a nested parameter, such as optim: {parameters: ...}."""
    if isinstance(value, dict) and value:
        for inner, item in value.items():
            yield from overrides(f"{key}.{inner}", item)
    else:
        yield f"{key}={literal(value)}"
