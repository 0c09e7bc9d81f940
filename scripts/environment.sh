# Sourced by the scripts here, which set `root` to the clone: sets up .venv on first use, and again when
# what it depends on has changed. The argument is the list of extras to install, such as "data dev".

set_up_environment() {
  local extras=$1 venv="$root/.venv" wanted python
  wanted="$(cat "$root/pyproject.toml" "$root/scripts/constraints.txt" | cksum) $root"
  is_set_up && return
  (
    if command -v flock >/dev/null; then
      flock 9 # of two first uses at once the second waits here
    fi
    is_set_up && exit
    echo "setting up $venv: once, takes minutes" >&2
    rm -f "$venv"/set-up-for-*
    if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
      python=$(find_python)
      "$python" -m venv --clear "$venv"
    fi
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      -c "$root/scripts/constraints.txt" -e "$root[${extras// /,}]" >&2
    for extra in $extras; do # last: without these files the next use starts over
      echo "$wanted" >"$venv/set-up-for-$extra"
    done
  ) 9<"$root/pyproject.toml"
}

is_set_up() {
  local extra
  for extra in $extras; do
    [[ "$(cat "$venv/set-up-for-$extra" 2>/dev/null)" == "$wanted" ]] || return 1
  done
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
