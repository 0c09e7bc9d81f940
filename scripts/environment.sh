# Sourced by the scripts here, which set `root` to the clone. Sets up .venv on first use and after changes of
# its dependencies. The argument is the list of extras to install, such as "data dev".

set_up_environment() {
  local extras=$1 venv="$root/.venv" wanted
  wanted="$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum) $root"
  is_set_up && return
  (
    if command -v flock >/dev/null; then
      flock 9 # of two concurrent first uses, the second waits here
    fi
    is_set_up && exit
    echo "setting up $venv: once, takes from 10 seconds to minutes" >&2
    is_usable || create || exit
    rm -f "$venv"/set-up-for-*
    touch "$venv/unfinished"
    "$venv/bin/python" "$root/scripts/install.py" $extras >&2
    for extra in $extras; do # last: without these files, the next use starts over
      echo "$wanted" >"$venv/set-up-for-$extra"
    done
    rm "$venv/unfinished"
  ) 9<"$root/pyproject.toml"
}

is_set_up() {
  local extra
  for extra in $extras; do
    [[ "$(cat "$venv/set-up-for-$extra" 2>/dev/null)" == "$wanted" ]] || return 1
  done
  [[ -z "${TORCH_BACKEND-}" || "$(cat "$venv/torch-backend" 2>/dev/null)" == "$TORCH_BACKEND" ]]
}

# False after an interrupted set-up, which leaves incomplete packages, and in a copy of another clone, whose
# programs start the Python of that clone.
is_usable() {
  local last
  [[ ! -e "$venv/unfinished" ]] && "$venv/bin/python" -c 'import pip' 2>/dev/null || return 1
  for last in "$venv"/set-up-for-*; do
    [[ ! -e "$last" || "$(cut -d ' ' -f 3- "$last")" == "$root" ]] || return 1
  done
}

create() {
  local python
  if [[ -L "$venv" ]]; then # what it names may be the environment of another clone
    echo "error: $venv is a link. Set-up would empty what it names: remove the link, and set-up makes a folder." >&2
    return 2
  fi
  python=$(find_python)
  mkdir -p "$venv"
  find "$venv/" -mindepth 1 -delete
  touch "$venv/unfinished"
  "$python" -m venv "$venv"
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: none of these is a Python 3.11 to 3.13 with venv: ${PYTHON:-python3 python3.13 python3.12 python3.11}." >&2
  echo "Install one (python3.12 and python3.12-venv, say), or name it: PYTHON=/path/to/python3.12 $0" >&2
  return 2
}
