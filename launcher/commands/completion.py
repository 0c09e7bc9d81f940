"""Completion in bash: the script that a shell evaluates, and the choices that it queries.

Owns the script, because Hydra's supports only commands of one word and not `python -m launcher`, and
translates the typed line for Hydra, which finds the choices. Imports no torch; prints nothing on errors,
which would appear in the line being typed.

    eval "$(python -m launcher --shell-completion install=bash)"     # in ~/.bashrc to keep it
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Sequence

from launcher.commands.arguments import COMMANDS as SUBCOMMANDS
from launcher.commands.arguments import parse
from launcher.config.composition import Composer, Request
from launcher.config.trees import leaves
from launcher.errors import ConfigError

INSTALL, UNINSTALL, QUERY = "install=bash", "uninstall=bash", "query=bash"
COMMANDS = "launcher python python3"
SCRIPT = f"""\
_launcher_complete()
{{
    local words=($COMP_LINE) count=1
    COMPREPLY=()
    if [[ ${{words[0]##*/}} == python* ]]; then
        if [[ ${{words[1]}} != -m || ${{words[2]}} != launcher ]]; then
            compopt +o nospace 2> /dev/null
            [[ ! $_launcher_before ]] || "$_launcher_before" "$@"
            return
        fi
        count=3
    fi
    local choices=$(COMP_LINE=$COMP_LINE "${{words[@]:0:count}}" --shell-completion {QUERY} 2> /dev/null)
    local word=${{COMP_LINE:0:COMP_POINT}}
    word=${{word##* }}
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
    if [[ ${{#COMPREPLY[@]}} == 0 && $word == *@(path|dir|resume)=* ]]; then
        COMPREPLY=($(compgen -P "${{word%%=*}}=" -f -- "${{word#*=}}"))
    fi
    COMPREPLY=("${{COMPREPLY[@]#"${{word%"$2"}}"}}")  # bash replaces what follows the last = or :
}}
# What completes other lines of Python, which bash-completion loads only where it is needed.
if [[ $(complete -p python 2> /dev/null) != *" _launcher_complete "* ]]; then
    {{ _comp_load -- python || _completion_loader python; }} &> /dev/null
    _launcher_before=$(complete -p python 2> /dev/null | sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p')
fi
complete -o nospace -o bashdefault -o default -F _launcher_complete {COMMANDS}
"""
REMOVAL = f"""\
complete -r {COMMANDS}
[[ ! $_launcher_before ]] || complete -o bashdefault -o default -F $_launcher_before python python3
unset -f _launcher_complete
"""

OF_ELEMENT = re.compile(r"[.=]\d+[.=]$")
OPEN = re.compile(r"[\w.]+\.\w+\.")  # within a section; the sections themselves are no lists

AskHydra = Callable[[Request, Sequence[str]], int]


def answer(request: Request, ask_hydra: AskHydra) -> int:
    """Print the script, or the choices for COMP_LINE; other shells get Hydra's own."""
    if request.overrides == (INSTALL,):
        print(SCRIPT, end="")
    elif request.overrides == (UNINSTALL,):
        print(REMOVAL, end="")
    elif request.overrides == (QUERY,):
        print(choices(os.environ.get("COMP_LINE", ""), ask_hydra), end="")
    else:
        return ask_hydra(request, ["--shell-completion", *request.overrides])
    return 0


def choices(line: str, ask_hydra: AskHydra) -> str:
    """The possible completions of a line, separated by spaces; empty if bash should offer files."""
    words = line.split()
    typed = words[3:] if words[1:3] == ["-m", "launcher"] else words[1:]
    current = "" if line.endswith(" ") or not typed else typed.pop()
    try:
        arguments = parse(typed)
        name = arguments.flags.get("--config-name") or "config"
        asked = Request(arguments.words, arguments.config_dir, name)
        own = [asked.search_path, *(word for word in arguments.words if not word.startswith("hydra."))]
    except ConfigError:
        return ""
    if arguments.command != "train":
        return ""
    commands = "" if arguments.words or not current else f"{' '.join(SUBCOMMANDS)} "
    os.environ["COMP_LINE"] = " ".join(["launcher", *own, current])
    out = io.StringIO()
    quiet = contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO())
    with quiet[0], quiet[1], contextlib.suppress(Exception, SystemExit):
        ask_hydra(asked, ["--shell-completion", QUERY])
    return commands + _lists_as_values(out.getvalue(), asked)


def _lists_as_values(offered: str, asked: Request) -> str:
    """A list is set as a whole: Hydra offers the numbers of its elements, which no override can set."""
    words = [word for word in offered.split() if not OF_ELEMENT.search(word)]
    if any(OPEN.fullmatch(word) for word in words):
        with contextlib.suppress(Exception):  # of a line with errors
            tree = Composer(asked).resolved(asked.overrides).tree
            lists = {f"{key}." for key, value in leaves(tree) if isinstance(value, list)}
            words = [f"{word[:-1]}=" if word in lists else word for word in words]
    return " ".join(words)
