# shellcheck shell=bash
# Sourced by the scripts: steps that say what they do, how long it took, and what went wrong.
# Needs `steps_log`, the folder of the steps' logs. Names the script by $0.

# shellcheck disable=SC2154 # steps_log
steps_program=${0#./}

fail() { # MESSAGE: what is wrong and what to do
  echo "$steps_program: $*" >&2
  exit 1
}

torch_versions() { awk '!/^#/ { print $1 }' launch/torch_versions.txt; }
# torch_pins VERSION: what is installed for this version of torch, one package a line; nothing for unknown versions
torch_pins() { awk -v torch="$1" '$1 == torch { for (i = 2; i <= NF; ++i) print $i }' launch/torch_versions.txt; }
default_torch() { awk '!/^#/ { print $1; exit }' launch/torch_versions.txt; }

# torch_environment VERSION: the Python environment with this version of torch
torch_environment() {
  local environment=$HOME/.cache/megashard/venv
  [ "$1" = "$(default_torch)" ] || environment+=-$1
  echo "${MEGASHARD_VENV:-$environment}"
}

seconds_since() { # BEGIN, from $EPOCHREALTIME
  local us=$((${EPOCHREALTIME/[.,]/} - ${1/[.,]/}))
  printf '%d.%d s' $((us / 1000000)) $((us / 100000 % 10))
}

# show_progress MESSAGE BEGIN LOG: writes the step's line again, for as long as this shell waits for the command: with
# ninja's count of what is done where the log has one, and with the time.
show_progress() {
  local size columns done line
  while kill -0 $$ 2>/dev/null; do
    sleep 0.5
    done=$(tail -c 4096 "$3" | grep -ao '^\[[0-9]*/[0-9]*\]' | tail -n 1) || true  # a log without a count has no line
    line="==> $1 ... ${done:+$done }$(seconds_since "$2")"
    size=$(stty size <&1 2>/dev/null) || size=""
    columns=${size#* }
    printf '\r\033[K%s' "${line:0:$((${columns:-80} - 1))}"
  done
}

# run_step COMMAND...: sets `code`. A Ctrl-C ends the command, and then this script.
run_step() {
  code=0 interrupted=""
  trap 'interrupted=yes' INT
  ("$@") </dev/null || code=$?
  trap - INT
  [ "$code" -ne 130 ] || interrupted=yes
}

stop_if_interrupted() { # MESSAGE BEGIN
  [ -n "$interrupted" ] || return 0
  echo "$steps_program: interrupted in '$1' after $(seconds_since "$2"); run it again to go on" >&2
  exit 130
}

# step MESSAGE COMMAND...: runs the command; its output goes to a log, whose end is shown when it fails. On a terminal
# its line tells the progress.
step() {
  local message=$1 begin=$EPOCHREALTIME log code interrupted shown=""
  shift
  mkdir -p "$steps_log"
  log=$steps_log/$(tr -cs 'a-zA-Z0-9\n' '_' <<<"${message:0:40}").log
  printf '==> %s ... ' "$message"
  : >"$log"
  if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then
    show_progress "$message" "$begin" "$log" &
    shown=$!
  fi
  run_step "$@" >"$log" 2>&1
  if [ -n "$shown" ]; then
    kill "$shown" 2>/dev/null && wait "$shown" 2>/dev/null || true
    printf '\r\033[K==> %s ... ' "$message"
  fi
  if [ "$code" -eq 0 ]; then
    seconds_since "$begin" && echo
    return 0
  fi
  [ -z "$interrupted" ] || echo
  stop_if_interrupted "$message" "$begin"
  echo "failed after $(seconds_since "$begin")"
  tail -n 30 "$log" >&2
  fail "'$message' failed with exit code $code; all it said is in $log"
}

# shown_step MESSAGE COMMAND...: as step, with the output on the terminal.
shown_step() {
  local message=$1 begin=$EPOCHREALTIME code interrupted
  shift
  echo "==> $message"
  run_step "$@"
  [ "$code" -eq 0 ] || stop_if_interrupted "$message" "$begin"
  [ "$code" -eq 0 ] || fail "'$message' failed with exit code $code after $(seconds_since "$begin")"
  echo "==> $message: took $(seconds_since "$begin")"
}
