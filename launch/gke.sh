#!/usr/bin/env bash
# TPU slices of a GKE cluster: one JobSet with the learner's slices and the generators'.
set -euo pipefail
# shellcheck source=launch/settings.sh
source "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

usage() {
	cat <<'END'
usage: launch/gke.sh ACTION [--config FILE] [--dry-run]

  apply    create the JobSet of the configuration, or leave it if it is there as it is
  status   the JobSet, its pods and where they run
  logs     follow the log of the learner's first host (--all: of all pods)
  delete   delete the JobSet (its pods get SIGTERM and write a checkpoint), and see that no pod is left. The run itself
           stays in BUCKET/runs/NAME.

  --config FILE   default launch/config.sh; make it from launch/config.sh.example
  --dry-run       print the commands and the manifest only; kubectl and gcloud need not be installed
The cluster needs JobSet (0.6 or newer) and node pools of the topology, or auto-provisioning. Node pools are neither
made nor deleted here: they cost money as long as they have nodes. XPK (github.com/AI-Hypercomputer/xpk) is another way
to make clusters and to submit work to them.
END
}

# The label of GKE for a chip.
accelerator() {
	case $1 in
	v4:*) echo tpu-v4-podslice ;;
	v5e:*) echo tpu-v5-lite-podslice ;;
	v5p:*) echo tpu-v5p-slice ;;
	v6e:*) echo tpu-v6e-slice ;;
	esac
}

# A text as a string of JSON, which is one of YAML as well.
json() {
	local text=$1
	text=${text//\\/\\\\}
	text=${text//\"/\\\"}
	text=${text//$'\t'/\\t}
	text=${text//$'\r'/\\r}
	printf '"%s"' "${text//$'\n'/\\n}"
}

# What a pod runs: it fetches the source and becomes launch/host.sh with COMMAND. Kubernetes reads $$ as $.
pod_lines() {
	sed 's/\$/$$/g' <<END
set -eu
mkdir -p /tmp/m2po
cd /tmp/m2po
$(fetch_lines)
exec $(quoted "${COMMAND[@]}")
END
}

# One entry of replicatedJobs: name, topology, number of slices. The pod of a host that was preempted is replaced
# without being counted; bad input fails the JobSet; anything else, after host.sh has given up, restarts it.
replicated_job() {
	local count=$((($(chips "$2") + CHIPS_PER_HOST - 1) / CHIPS_PER_HOST)) chips
	chips=$(($(chips "$2") < CHIPS_PER_HOST ? $(chips "$2") : CHIPS_PER_HOST))
	cat <<END
  - name: $1
    replicas: $3
    template:
      spec:
        parallelism: $count
        completions: $count
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: Ignore
            onPodConditions:
            - type: DisruptionTarget
              status: "True"
          - action: Ignore
            onExitCodes:
              containerName: m2po
              operator: In
              values: [143]
          - action: FailJob
            onExitCodes:
              containerName: m2po
              operator: In
              values: [2, 130]
        template:
          spec:
            restartPolicy: Never
            serviceAccountName: $(json "$SERVICE_ACCOUNT")
            terminationGracePeriodSeconds: $GRACE_S
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $(accelerator "$2")
              cloud.google.com/gke-tpu-topology: $(json "${2#*:}")
END
	[[ $SPOT == no ]] || cat <<'END'
              cloud.google.com/gke-spot: "true"
            tolerations:
            - key: cloud.google.com/gke-spot
              operator: Equal
              value: "true"
              effect: NoSchedule
END
	cat <<END
            containers:
            - name: m2po
              image: $(json "$IMAGE")
              command: [bash, -c, $(json "$(pod_lines)")]
              env:
              - name: PYTHONUNBUFFERED
                value: "1"
              ports:
              - containerPort: 8471
              - containerPort: 8080
              resources:
                requests:
                  google.com/tpu: $chips
                limits:
                  google.com/tpu: $chips
END
}

manifest() {
	cat <<END
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $NAME
  namespace: $(json "$NAMESPACE")
  annotations:
    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool
spec:
  failurePolicy:
    maxRestarts: 10
    rules:
    - name: badInput
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  successPolicy:
    operator: All
    targetReplicatedJobs: [learner]
  replicatedJobs:
END
	learner_command
	replicated_job learner "$LEARNER_TOPOLOGY" "$LEARNER_SLICES"
	((GENERATOR_SLICES == 0)) || {
		generator_command
		replicated_job generator "$GENERATOR_TOPOLOGY" "$GENERATOR_SLICES"
	}
}

kubectl_here() { run kubectl "--context=gke_${PROJECT}_${CLUSTER_LOCATION}_$CLUSTER" "--namespace=$NAMESPACE" "$@"; }

get_credentials() {
	run gcloud container clusters get-credentials "$CLUSTER" "--location=$CLUSTER_LOCATION" "--project=$PROJECT"
}

apply() {
	if [[ $DRY_RUN ]]; then
		printf "%s <<'MANIFEST'\n%s\nMANIFEST\n" "$(kubectl_here apply --filename=-)" "$(manifest)"
		return
	fi
	manifest | kubectl_here apply --filename=-
	say "$NAME is in the cluster $CLUSTER; it costs money until: ${0} delete --config $(quoted "$CONFIG")"
	say "results in $RUN; log: ${0} logs --config $(quoted "$CONFIG")"
}

delete() {
	kubectl_here delete jobset "$NAME" --ignore-not-found --cascade=foreground --timeout="$((GRACE_S + 120))s" || true
	[[ ! $DRY_RUN ]] || return 0
	local left
	left=$(kubectl_here get pods --selector="$PODS" --output=name)
	if [[ $left ]]; then
		say "still there, and may cost money: ${left//$'\n'/ }"
		say "repeat this command"
		exit 1
	fi
	say "$NAME is deleted; the run stays in $RUN"
	say "node pools stay, and cost money while they have nodes: gcloud container node-pools list --cluster=$CLUSTER" \
		"--location=$CLUSTER_LOCATION --project=$PROJECT"
}

read_flags 'apply status logs delete' "$@"
read_config
require_shared
require 'CLUSTER:name of the GKE cluster' 'CLUSTER_LOCATION:region or zone of the cluster'
NAMESPACE=${NAMESPACE:-default} IMAGE=${IMAGE:-python:3.12-bookworm} CHIPS_PER_HOST=${CHIPS_PER_HOST:-4}
SERVICE_ACCOUNT=${SERVICE_ACCOUNT:-default}
require_count CHIPS_PER_HOST 1
require_command gcloud
require_command kubectl
PODS=jobset.sigs.k8s.io/jobset-name=$NAME LOGS_OF="$PODS,jobset.sigs.k8s.io/replicatedjob-name=learner"
LOGS_OF+=",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
for flag in ${REST[@]+"${REST[@]}"}; do
	[[ $ACTION$flag == logs--all ]] || fail "there is no flag $flag for $ACTION (--help says more)"
	LOGS_OF=$PODS
done

get_credentials
case $ACTION in
apply) apply ;;
status)
	kubectl_here get jobset "$NAME" --ignore-not-found
	kubectl_here get pods --selector="$PODS" --output=wide
	;;
logs) kubectl_here logs --selector="$LOGS_OF" --tail=200 --prefix --follow --max-log-requests=64 ;;
delete) delete ;;
esac
