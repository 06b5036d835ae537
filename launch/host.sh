#!/usr/bin/env bash
# The entry of every host of every kind: makes .venv, runs m2po, and starts it again after a preemption or a failure.
set -euo pipefail

usage() {
	cat <<'END'
usage: launch/host.sh [--dry-run] COMMAND [ARGUMENT ...]

Makes .venv next to this folder with what a TPU host needs, and runs its `m2po COMMAND ...` here, for instance
  launch/host.sh train experiments/quickstart.py:m2po-s256 --run gs://bucket/runs/mine --distributed

By the exit code of m2po:
  0          done
  2, 130     bad input, or stopped by hand: ends with the same code
  143        preempted, its checkpoint written: starts again, unless this host itself got the SIGTERM
  any other  failed, for instance because another host was lost: starts again
SIGTERM and SIGINT are handed on to m2po, which is waited for. The restarts used up: ends with 1.

On TPU slices and GKE, JAX finds the other hosts. Elsewhere set, for each of several processes, JAX_COORDINATOR_ADDRESS
(host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID; launch/local.sh does.

  M2PO_RESTARTS          at most so many restarts (10) ...
  M2PO_RESTART_MINUTES   ... in so many minutes (60)
  M2PO_RESTART_WAIT_S    seconds before the first restart (5); twice as many before each further one, at most 300
  M2PO_COMMAND           a program to run instead of .venv/bin/m2po; nothing is installed then
END
}

say() { printf 'host.sh: %s\n' "$*" >&2; }

fail() {
	say "$@"
	exit 2
}

number() {
	[[ ${!1} =~ ^[0-9]{1,6}$ ]] || fail "$1 is '${!1}': it must be a number"
	printf -v "$1" '%d' "$((10#${!1}))"
}

# Run a command to its end, whatever signals come; they are handed on to it. Its exit code is left in CODE.
# Job control gives it a process group of its own, so that Ctrl-C reaches it once, and does not ignore SIGINT.
attend() {
	local code
	set -m
	"$@" </dev/null &
	child=$!
	set +m
	[[ -z $signal ]] || kill -s "$signal" "$child" 2>/dev/null || true
	while :; do
		interrupted=
		code=0
		wait "$child" 2>/dev/null || code=$?
		[[ $code == 127 && ${CODE:-} ]] || CODE=$code
		[[ $interrupted ]] || break
	done
	child=
}

handle() {
	signal=$1 interrupted=yes
	[[ -z $child ]] || kill -s "$1" "$child" 2>/dev/null || true
	[[ -z $sleeper ]] || kill "$sleeper" 2>/dev/null || true
}

# Sleep, but not after a signal.
pause() {
	[[ -z $signal ]] || return 0
	sleep "$1" &
	sleeper=$!
	[[ -z $signal ]] || kill "$sleeper" 2>/dev/null || true # it came before there was a sleeper
	wait "$sleeper" 2>/dev/null || true
	sleeper=
}

end_if_signalled() {
	case $signal in
	TERM) say "told to stop by SIGTERM: not started again here" && exit 143 ;;
	INT) say "stopped by hand" && exit 130 ;;
	esac
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# A Python for .venv in PYTHON: one of the machine, or else one that uv brings (TPU VMs have Python 3.10).
find_python() {
	local candidate
	for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
		if new_enough "$candidate"; then
			PYTHON=$candidate
			return
		fi
	done
	say "no Python 3.11 or newer here: getting 3.12 with uv"
	attend python3 -m pip install --quiet --user "$(sed -n 's/^\(uv==[^ ]*\).*/\1/p' "$root/requirements.lock")"
	((CODE == 0)) || return 0
	attend python3 -m uv python install --quiet 3.12
	((CODE == 0)) || return 0
	PYTHON=$(python3 -m uv python find 3.12)
}

install() {
	CODE=0
	find_python
	if ((CODE == 0)); then attend make --no-print-directory -C "$root" host PYTHON="$PYTHON"; fi
	end_if_signalled
	((CODE == 0)) || {
		say "cannot make .venv: see above"
		exit 1
	}
}

# Count a restart; ends the script where there were too many. Leaves the time to wait in WAIT_S.
count_restart() {
	local now=$SECONDS time recent=()
	for time in ${restarts[@]+"${restarts[@]}"}; do
		((now - time >= M2PO_RESTART_MINUTES * 60)) || recent+=("$time")
	done
	restarts=(${recent[@]+"${recent[@]}"})
	if ((${#restarts[@]} >= M2PO_RESTARTS)); then
		say "m2po $1: not started again after $M2PO_RESTARTS restarts in $M2PO_RESTART_MINUTES minutes"
		exit 1
	fi
	WAIT_S=$((M2PO_RESTART_WAIT_S * (1 << (${#restarts[@]} < 10 ? ${#restarts[@]} : 10))))
	((WAIT_S <= 300)) || WAIT_S=300
	restarts+=("$now")
	say "m2po $1: restart ${#restarts[@]} of at most $M2PO_RESTARTS in $M2PO_RESTART_MINUTES minutes, in $WAIT_S s"
}

DRY_RUN=
while [[ ${1:-} == -* ]]; do
	case $1 in
	-h | --help) usage && exit 0 ;;
	--dry-run) DRY_RUN=yes ;;
	*) fail "there is no flag $1 here; those of m2po follow its command (--help says more)" ;;
	esac
	shift
done
(($#)) || fail "say what to run, for instance: launch/host.sh train experiments/quickstart.py:m2po-s256 --distributed"
M2PO_RESTARTS=${M2PO_RESTARTS:-10} M2PO_RESTART_MINUTES=${M2PO_RESTART_MINUTES:-60}
M2PO_RESTART_WAIT_S=${M2PO_RESTART_WAIT_S:-5}
number M2PO_RESTARTS
number M2PO_RESTART_MINUTES
number M2PO_RESTART_WAIT_S
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=${M2PO_COMMAND:-$root/.venv/bin/m2po}
if [[ $DRY_RUN ]]; then
	[[ ${M2PO_COMMAND:-} ]] || printf 'make -C %q host\n' "$root"
	printf '%q ' "$program" "$@"
	echo
	exit 0
fi

child='' sleeper='' signal='' interrupted='' restarts=()
trap 'handle TERM' TERM
trap 'handle INT' INT
[[ ${M2PO_COMMAND:-} ]] || install
while :; do
	CODE=
	attend "$program" "$@"
	case $CODE in
	0 | 2 | 126 | 127 | 130) exit "$CODE" ;;
	esac
	end_if_signalled
	if ((CODE == 143)); then count_restart "was preempted"; else count_restart "failed with exit code $CODE"; fi
	pause "$WAIT_S"
	end_if_signalled
done
