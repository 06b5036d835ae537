#!/usr/bin/env bash
# What every host of a slice does, as processes of this machine: launch/host.sh, several times, on virtual CPU devices.
set -euo pipefail

usage() {
	cat <<'END'
usage: launch/local.sh N [--devices M] [--dry-run] COMMAND [ARGUMENT ...]

Starts N processes with M virtual CPU devices each (1), joined as the hosts of a slice are, for instance
  launch/local.sh 2 --devices 2 train experiments/quickstart.py:m2po-s256 --run runs/two --mesh.data 4
Adds --distributed. Each line of output begins with its process. Ctrl-C stops all of them, with a checkpoint.
What launch/host.sh --help says of exit codes and restarts is so here, with M2PO_RESTARTS=3 unless it is set.
The exit code is that of the first process that has one other than 0.
END
}

fail() {
	printf 'local.sh: %s\n' "$*" >&2
	exit 2
}

# shellcheck disable=SC2329 # the traps call it
hand_on() {
	local pid
	interrupted=yes
	for pid in ${hosts[@]+"${hosts[@]}"}; do kill -s "$1" "$pid" 2>/dev/null || true; done
}

prefixed() {
	local line
	trap '' INT TERM
	while IFS= read -r line || [[ $line ]]; do printf '[%s] %s\n' "$1" "$line"; done
}

# Wait for a process to its end, whatever signals come; its exit code is left in CODE.
attend() {
	CODE=
	while :; do
		local code=0
		interrupted=
		wait "$1" 2>/dev/null || code=$?
		[[ $code == 127 && $CODE ]] || CODE=$code
		[[ $interrupted ]] || break
	done
}

free_port() {
	local port=$((20000 + RANDOM % 20000))
	while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do port=$((port + 1)); done
	echo "$port"
}

N='' DEVICES=1 DRY_RUN=
while (($#)); do
	case $1 in
	-h | --help) usage && exit 0 ;;
	--dry-run) DRY_RUN=yes ;;
	--devices)
		DEVICES=${2:-}
		shift
		;;
	--devices=*) DEVICES=${1#*=} ;;
	-*) fail "there is no flag $1 here; those of m2po follow its command (--help says more)" ;;
	*)
		[[ -z $N ]] || break
		N=$1
		;;
	esac
	shift || break
done
[[ $N =~ ^[1-9][0-9]{0,2}$ ]] || fail "say how many processes first, for instance: launch/local.sh 2 train ..."
[[ $DEVICES =~ ^[1-9][0-9]{0,2}$ ]] || fail "--devices is '$DEVICES': it must be a number from 1"
(($#)) || fail "say what to run, for instance: launch/local.sh $N train experiments/quickstart.py:m2po-s256"

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export M2PO_COMMAND=${M2PO_COMMAND:-${folder%/*}/.venv/bin/m2po}
common=(
	"JAX_COORDINATOR_ADDRESS=127.0.0.1:$(free_port)" "JAX_NUM_PROCESSES=$N" JAX_PLATFORMS=cpu
	"XLA_FLAGS=${XLA_FLAGS:-} --xla_force_host_platform_device_count=$DEVICES" "M2PO_RESTARTS=${M2PO_RESTARTS:-3}"
)
if [[ $DRY_RUN ]]; then
	echo "export M2PO_COMMAND=$(printf %q "$M2PO_COMMAND")"
	for ((i = 0; i < N; i++)); do
		printf '%q ' env "${common[@]}" "JAX_PROCESS_ID=$i" "$folder/host.sh" "$@" --distributed
		echo '&'
	done
	echo wait
	exit 0
fi

[[ -x $M2PO_COMMAND ]] || fail "there is no $M2PO_COMMAND: make it with 'make .venv/.installed'"
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
hosts=() readers=() interrupted=''
trap 'hand_on INT' INT
trap 'hand_on TERM' TERM
set -m # a process group each, so that Ctrl-C reaches a process once
for ((i = 0; i < N; i++)); do
	mkfifo "$pipes/$i"
	prefixed "$i" <"$pipes/$i" &
	readers+=($!)
	env "${common[@]}" "JAX_PROCESS_ID=$i" "$folder/host.sh" "$@" --distributed </dev/null >"$pipes/$i" 2>&1 &
	hosts+=($!)
done
worst=0
for ((i = 0; i < N; i++)); do
	attend "${hosts[i]}"
	((worst != 0)) || worst=$CODE
done
for ((i = 0; i < N; i++)); do attend "${readers[i]}"; done
exit "$worst"
