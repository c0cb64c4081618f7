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

# step MESSAGE COMMAND...: runs the command; its output goes to a log, whose end is shown when it fails.
step() {
  local message=$1 begin=$EPOCHREALTIME log code=0
  shift
  mkdir -p "$steps_log"
  log=$steps_log/$(tr -cs 'a-zA-Z0-9\n' '_' <<<"${message:0:40}").log
  printf '==> %s ... ' "$message"
  "$@" >"$log" 2>&1 </dev/null || code=$?
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
