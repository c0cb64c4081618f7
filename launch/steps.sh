# shellcheck shell=bash
# Sourced by the scripts: steps that say what they do, how long it took, and what went wrong.
# Needs `steps_log`, the folder of the steps' logs. Names the script by $0.

# shellcheck disable=SC2154 # steps_log
steps_program=${0#./}

fail() { # MESSAGE: what is wrong and what to do
  echo "$steps_program: $*" >&2
  exit 1
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
    done=$(tail -c 4096 "$3" | grep -ao '^\[[0-9]*/[0-9]*\]' | tail -n 1)
    line="==> $1 ... ${done:+$done }$(seconds_since "$2")"
    size=$(stty size <&1 2>/dev/null) || size=""
    columns=${size#* }
    printf '\r\033[K%s' "${line:0:$((${columns:-80} - 1))}"
  done
}

# step MESSAGE COMMAND...: runs the command; its output goes to a log, whose end is shown when it fails. On a terminal
# its line tells the progress.
step() {
  local message=$1 begin=$EPOCHREALTIME log code=0 shown=""
  shift
  mkdir -p "$steps_log"
  log=$steps_log/$(tr -cs 'a-zA-Z0-9\n' '_' <<<"${message:0:40}").log
  printf '==> %s ... ' "$message"
  : >"$log"
  if [ -t 1 ] && [ "${TERM:-dumb}" != dumb ]; then
    show_progress "$message" "$begin" "$log" &
    shown=$!
  fi
  "$@" >"$log" 2>&1 </dev/null || code=$?
  if [ -n "$shown" ]; then
    kill "$shown" 2>/dev/null && wait "$shown" 2>/dev/null || true
    printf '\r\033[K==> %s ... ' "$message"
  fi
  if [ "$code" -eq 0 ]; then
    seconds_since "$begin" && echo
    return 0
  fi
  echo "failed after $(seconds_since "$begin")"
  tail -n 30 "$log" >&2
  fail "'$message' failed with exit code $code; all it said is in $log"
}

# shown_step MESSAGE COMMAND...: as step, with the output on the terminal.
shown_step() {
  local message=$1 begin=$EPOCHREALTIME code=0
  shift
  echo "==> $message"
  "$@" </dev/null || code=$?
  [ "$code" -eq 0 ] || fail "'$message' failed with exit code $code after $(seconds_since "$begin")"
  echo "    took $(seconds_since "$begin")"
}
