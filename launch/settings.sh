# shellcheck shell=bash
# shellcheck disable=SC2034 # the callers use what is set here
# Sourced by queued_resource.sh and gke.sh: the flags they share, the configuration, and how commands are run.
# The functions of a caller see CONFIG, ACTION, DRY_RUN, and every value of the configuration.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

fail() {
	say "$@"
	exit 2
}

# Words as one line of shell, or a few where a word has several lines; plain words stay plain.
quoted() {
	local word text=
	for word; do
		if ! [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
			word="'$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"
		fi
		text+="${text:+ }$word"
	done
	printf '%s\n' "$text"
}

# Run a command, or print it.
run() {
	if [[ $DRY_RUN ]]; then quoted "$@"; else "$@"; fi
}

# ACTION and flags from the command line; the first argument lists the actions. Other flags are left in REST.
read_flags() {
	local actions=$1
	shift
	CONFIG=$(dirname "${BASH_SOURCE[0]}")/config.sh ACTION='' DRY_RUN='' REST=()
	while (($#)); do
		case $1 in
		-h | --help)
			usage
			exit 0
			;;
		--dry-run) DRY_RUN=yes ;;
		--config)
			(($# > 1)) || fail "--config needs a file"
			CONFIG=$2
			shift
			;;
		--config=*) CONFIG=${1#*=} ;;
		-*) REST+=("$1") ;;
		*)
			[[ -z $ACTION && " $actions " == *" $1 "* ]] || fail "there is no action '$1' here: use one of $actions"
			ACTION=$1
			;;
		esac
		shift
	done
	[[ $ACTION ]] || fail "say what to do: one of $actions (--help says more)"
}

# Every value of the configuration, from CONFIG only and never from the caller's environment.
read_config() {
	unset PROJECT ZONE BUCKET NAME REPOSITORY REVISION ARGUMENTS LEARNER_TOPOLOGY LEARNER_SLICES SPOT GRACE_S \
		GENERATOR_SLICES GENERATOR_TOPOLOGY GENERATOR_ARGUMENTS RUNTIME_VERSION SSH_FLAGS CLUSTER \
		CLUSTER_LOCATION NAMESPACE IMAGE CHIPS_PER_HOST SERVICE_ACCOUNT
	[[ -f $CONFIG ]] || fail "there is no $CONFIG: copy launch/config.sh.example there and fill it in"
	local wrong
	wrong=$(bash -n "$CONFIG" 2>&1) || fail "$CONFIG is not valid bash: ${wrong%%$'\n'*}"
	[[ $CONFIG == */* ]] || CONFIG=./$CONFIG
	set +eu
	# shellcheck source=/dev/null
	source "$CONFIG"
	set -eu
	LEARNER_SLICES=${LEARNER_SLICES:-1} SPOT=${SPOT:-no} GRACE_S=${GRACE_S:-300} GENERATOR_SLICES=${GENERATOR_SLICES:-0}
	declare -p GENERATOR_ARGUMENTS >/dev/null 2>&1 || GENERATOR_ARGUMENTS=()
	RUN=${BUCKET:-}/runs/${NAME:-}
}

# Refuse a configuration without these values, or with ones that cannot be; `NAME:what it is` each.
require() {
	local entry name
	for entry; do
		name=${entry%%:*}
		[[ ${!name:-} ]] || fail "$name is not set in $CONFIG: ${entry#*:}"
	done
}

require_shared() {
	require 'PROJECT:the Google Cloud project that pays' 'ZONE:where the slices are, such as us-east5-b' \
		'BUCKET:gs://bucket or gs://bucket/prefix' 'NAME:of the run' 'REPOSITORY:address to fetch m2po_jax from' \
		'REVISION:commit or tag to run' 'ARGUMENTS:the configuration and its flags, in parentheses' \
		'LEARNER_TOPOLOGY:chip and shape, such as v6e:4x4'
	[[ $NAME =~ ^[a-z]([-a-z0-9]{0,28}[a-z0-9])?$ ]] ||
		fail "NAME '$NAME' in $CONFIG must be small letters, digits and hyphens, at most 30, the first a letter"
	[[ $BUCKET == gs://?* && $BUCKET != */ ]] || fail "BUCKET '$BUCKET' in $CONFIG must be gs://bucket, with no / at its end"
	[[ $SPOT == yes || $SPOT == no ]] || fail "SPOT '$SPOT' in $CONFIG must be yes or no"
	require_count LEARNER_SLICES 1
	require_count GENERATOR_SLICES 0
	require_count GRACE_S 1
	require_list ARGUMENTS
	require_topology LEARNER_TOPOLOGY
	local argument
	for argument in "${ARGUMENTS[@]}"; do
		[[ $argument != --run && $argument != --run=* ]] ||
			fail "ARGUMENTS in $CONFIG must leave --run out: the run is BUCKET/runs/NAME, $RUN"
	done
	((GENERATOR_SLICES == 0)) && return
	require 'GENERATOR_TOPOLOGY:chip and shape, such as v6e:2x2'
	require_topology GENERATOR_TOPOLOGY
	require_list GENERATOR_ARGUMENTS
}

require_count() {
	if ! [[ ${!1} =~ ^(0|[1-9][0-9]{0,5})$ ]] || ((${!1} < $2)); then
		fail "$1 '${!1}' in $CONFIG must be a number from $2"
	fi
}

require_list() {
	[[ $(declare -p "$1") == 'declare -a'* ]] || fail "$1 in $CONFIG must be in parentheses: $1=(${!1})"
}

require_topology() {
	[[ ${!1} =~ ^(v4|v5e|v5p|v6e):[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] ||
		fail "$1 '${!1}' in $CONFIG must be a chip (v4, v5e, v5p, v6e) and a shape, such as v6e:4x4"
}

require_command() {
	[[ $DRY_RUN ]] || command -v "$1" >/dev/null || fail "$1 is not installed; --dry-run shows what would be run"
}

# Chips of a topology: 16 of v6e:4x4.
chips() {
	local shape=${1#*:}
	echo $((${shape//x/*}))
}

# What a host runs after it has the source, as words in COMMAND: learner_command, or generator_command.
learner_command() {
	local program=train
	((GENERATOR_SLICES == 0)) || program=learn
	COMMAND=(launch/host.sh "$program" "${ARGUMENTS[@]}" --run "$RUN" --distributed)
}
generator_command() { COMMAND=(launch/host.sh generate "$RUN" "${GENERATOR_ARGUMENTS[@]}"); }

# Lines of shell that bring the source at REVISION into the current directory, new or not.
fetch_lines() {
	quoted git init --quiet
	quoted git fetch --quiet --depth=1 "$REPOSITORY" "$REVISION"
	quoted git checkout --quiet --force --detach FETCH_HEAD
}
