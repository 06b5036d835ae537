#!/usr/bin/env bash
# TPU slices as queued resources of Google Cloud, and the run on all of their hosts.
# shellcheck disable=SC2329 # each_request calls functions by their names
set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

usage() {
	cat <<'END'
usage: launch/queued_resource.sh ACTION [--config FILE] [--dry-run]

  create   request the slices of the configuration that are not there yet, wait for them, and start the run on every
           host where it is not running. May be repeated at any time: after Ctrl-C, when a spot slice was taken away
           (a new one is requested, and the run resumes from its checkpoint), or when a host was lost.
  status   what is there, and what runs on its hosts
  logs     follow the log of the learner's first host (--all: of all its hosts)
  delete   stop the run (it writes a checkpoint), delete the slices, and see that they are gone (--now: do not wait
           for the checkpoint). The run itself stays in BUCKET/runs/NAME.

  --config FILE   default launch/config.sh; make it from launch/config.sh.example
  --dry-run       print the commands only; gcloud need not be installed
A slice costs money from the moment it is there until it is deleted, whether something runs on it or not.
END
}

# accelerator_type v5p:4x4x4 is v5p-128: v4 and v5p count the two cores of a chip.
accelerator_type() {
	local count
	count=$(chips "$1")
	case $1 in
	v5e:*) echo "v5litepod-$count" ;;
	v6e:*) echo "v6e-$count" ;;
	*) echo "${1%%:*}-$((2 * count))" ;;
	esac
}

# For each request of the configuration: visit REQUEST TOPOLOGY SLICES, with its command in COMMAND.
each_request() {
	local i
	learner_command
	"$1" "$NAME-learner" "$LEARNER_TOPOLOGY" "$LEARNER_SLICES"
	for ((i = 0; i < GENERATOR_SLICES; i++)); do
		generator_command
		"$1" "$NAME-generator-$i" "$GENERATOR_TOPOLOGY" 1
	done
}

queued() { # the action first, then the rest
	local action=$1
	shift
	run gcloud compute tpus queued-resources "$action" "$@" "--project=$PROJECT" "--zone=$ZONE"
}

on_hosts() { # REQUEST, hosts (all or a number), and lines of shell
	queued ssh "$1" --node="$2" --worker="$2" ${SSH_FLAGS[@]+"${SSH_FLAGS[@]}"} --command="$3"
}

# Lines of a request and its state each, of all in the zone.
listed() { queued list '--format=value(name.basename(),state.state)'; }

# The state of a request; nothing where there is none.
state_of() {
	local all
	all=$(listed) || return # errexit is off in command substitutions
	awk -v name="$1" '$1 == name { print $2 }' <<<"$all"
}

# Requests of this run that the configuration does not have (any more), a line each.
left_over() {
	[[ ! $DRY_RUN ]] || return 0
	local all i known=" $NAME-learner "
	for ((i = 0; i < GENERATOR_SLICES; i++)); do known+="$NAME-generator-$i "; done
	all=$(listed) || return # errexit is off in command substitutions
	awk -v known="$known" -v ours="^$NAME-(learner|generator-[0-9]+)\$" \
		'$1 ~ ours && !index(known, " " $1 " ") { print $1 }' <<<"$all"
}

request() {
	local where=(--node-id="$1")
	(($3 == 1)) || where=(--node-count="$3" --node-prefix="$1")
	[[ $SPOT == no ]] || where+=(--spot)
	queued create "$1" --accelerator-type="$(accelerator_type "$2")" --runtime-version="$RUNTIME_VERSION" "${where[@]}"
}

request_missing() {
	local state=
	[[ $DRY_RUN ]] || state=$(state_of "$1")
	case $state in
	'') [[ $DRY_RUN ]] || say "requesting $1: $3 x $2" ;;
	FAILED | SUSPENDED)
		say "$1 is $state, so it has no hosts any more: requesting it anew"
		queued delete "$1" --force --quiet
		;;
	*)
		say "$1 is there already: $state"
		return
		;;
	esac
	request "$@"
}

wait_until_active() {
	[[ ! $DRY_RUN ]] || {
		echo "# when $1 is ACTIVE, which is looked at every ${M2PO_POLL_S:-30} s:"
		return 0
	}
	local state seen=
	while :; do
		state=$(state_of "$1")
		[[ $state == "$seen" ]] || say "$1: ${state:-gone}"
		seen=$state
		case $state in
		ACTIVE) return ;;
		'' | FAILED | SUSPENDED | SUSPENDING | DELETING)
			say "$1 will not come up; what gcloud knows of it:"
			queued describe "$1" >&2 || true
			exit 1
			;;
		esac
		sleep "${M2PO_POLL_S:-30}"
	done
}

# Lines of shell that start COMMAND on a host as a service of systemd: it goes on after a reboot, gets SIGTERM when the
# host is shut down, and has GRACE_S seconds for its checkpoint then. Where it runs, nothing is done.
start_lines() {
	cat <<END
set -eu
if systemctl is-active --quiet $NAME; then echo "\$(hostname): $NAME is running already"; exit; fi
if ! { command -v git && command -v make; } >/dev/null; then sudo apt-get update -qq; sudo apt-get install -y -qq git make; fi
mkdir -p "\$HOME/$NAME/source"
cd "\$HOME/$NAME/source"
$(fetch_lines)
cat >../start.sh <<'START'
#!/usr/bin/env bash
cd "\$(dirname "\$0")/source"
exec $(quoted "${COMMAND[@]}")
START
chmod +x ../start.sh
sudo tee /etc/systemd/system/$NAME.service >/dev/null <<UNIT
[Unit]
Description=m2po, run $NAME
Wants=network-online.target
After=network-online.target
[Service]
User=\$(id -un)
ExecStart="\$HOME/$NAME/start.sh"
KillMode=mixed
TimeoutStopSec=$GRACE_S
[Install]
WantedBy=multi-user.target
UNIT
sudo systemctl daemon-reload
sudo systemctl enable --quiet $NAME
sudo systemctl restart $NAME
echo "\$(hostname): $NAME started"
END
}

start() {
	wait_until_active "$1"
	on_hosts "$1" all "$(start_lines)"
}

show() {
	local state=ACTIVE
	if [[ $DRY_RUN ]]; then
		listed
	else
		state=$(state_of "$1")
		say "$1 ($3 x $2): ${state:-not there}"
	fi
	[[ $state != ACTIVE ]] || on_hosts "$1" all \
		"echo \"\$(hostname): \$(systemctl is-active $NAME); \$(journalctl --unit=$NAME --lines=1 --output=cat)\"" ||
		say "$1: some hosts do not answer"
}

show_left_over() {
	local name names
	names=$(left_over)
	for name in $names; do say "$name is there as well, though $CONFIG does not have it; delete deletes it too"; done
}

stop() {
	local state=ACTIVE
	[[ $DRY_RUN ]] || state=$(state_of "$1")
	[[ $state == ACTIVE ]] || return 0
	[[ $DRY_RUN ]] || say "$1: stopping the run, with a checkpoint (at most $GRACE_S s)"
	on_hosts "$1" all "sudo systemctl stop $NAME" || say "$1: some hosts do not answer; deleting it all the same"
}

remove() {
	local state=
	[[ $DRY_RUN ]] || state=$(state_of "$1")
	if [[ ! $DRY_RUN && -z $state ]]; then
		say "$1 is not there"
		return
	fi
	queued delete "$1" --force --quiet || true
	[[ ! $DRY_RUN ]] || return 0
	state=$(state_of "$1")
	if [[ $state ]]; then
		say "$1 is still there ($state) and may cost money: repeat this command"
		LEFT=yes
	else
		say "$1 is deleted"
	fi
}

said() {
	[[ ! $DRY_RUN ]] || return 0
	say "$NAME runs on $(described); it costs money until: ${0} delete --config $(quoted "$CONFIG")"
	say "results in $RUN; log: ${0} logs --config $(quoted "$CONFIG")"
}

described() {
	local text="$LEARNER_SLICES x $LEARNER_TOPOLOGY"
	((GENERATOR_SLICES == 0)) || text+=" and $GENERATOR_SLICES x $GENERATOR_TOPOLOGY"
	echo "$text"
}

stopped_waiting() {
	echo >&2
	exit 130
}

# However create ends early, slices may be there: say so.
ended_early() {
	local code=$?
	((code == 0)) || say "ended early; what was requested stays, and may cost money: create goes on, delete takes it back"
	exit "$code"
}

read_flags 'create status logs delete' "$@"
read_config
require_shared
require 'RUNTIME_VERSION:of the TPU VMs, such as v2-alpha-tpuv6e'
require_command gcloud
LEFT='' LOGS_OF=0 NOW=''
for flag in ${REST[@]+"${REST[@]}"}; do
	case $ACTION$flag in
	logs--all) LOGS_OF=all ;;
	delete--now) NOW=yes ;;
	*) fail "there is no flag $flag for $ACTION (--help says more)" ;;
	esac
done

case $ACTION in
create)
	trap stopped_waiting INT
	trap ended_early EXIT
	each_request request_missing
	each_request start
	said
	;;
status)
	each_request show
	show_left_over
	;;
logs) on_hosts "$NAME-learner" "$LOGS_OF" "journalctl --unit=$NAME --lines=200 --output=cat --follow" ;;
delete)
	[[ $NOW ]] || each_request stop
	each_request remove
	names=$(left_over)
	for name in $names; do remove "$name"; done
	[[ $DRY_RUN ]] || say "the run stays in $RUN"
	[[ ! $LEFT ]] || exit 1
	;;
esac
