"""launch/gke.sh: the manifest against the structure of the API, what a pod runs, and what is asked of kubectl."""

import json
import shutil
import subprocess

import pytest
import yaml

from tests.launch import cloud
from tests.launch.scripts import AWKWARD, repository, run, valid_bash, write_config

SCRIPT = "gke.sh"
LABEL = "jobset.sigs.k8s.io/jobset-name=run-1"

# The fields of JobSet (jobset.x-k8s.io/v1alpha2), Job (batch/v1) and Pod (v1) that may be used here, and their types.
REQUIREMENTS = {"google.com/tpu": int}
ON_EXIT_CODES = {"containerName": str, "operator": str, "values": [int]}
POD_FAILURE_RULE = {
    "action": str,
    "onExitCodes": ON_EXIT_CODES,
    "onPodConditions": [{"type": str, "status": str}],
}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "env": [{"name": str, "value": str}],
    "ports": [{"containerPort": int}],
    "resources": {"requests": REQUIREMENTS, "limits": REQUIREMENTS},
}
POD = {
    "restartPolicy": str,
    "serviceAccountName": str,
    "terminationGracePeriodSeconds": int,
    "nodeSelector": {
        "cloud.google.com/gke-tpu-accelerator": str,
        "cloud.google.com/gke-tpu-topology": str,
        "cloud.google.com/gke-spot": str,
    },
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}],
    "containers": [CONTAINER],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "podFailurePolicy": {"rules": [POD_FAILURE_RULE]},
    "template": {"spec": POD},
}
JOB_SET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {
        "name": str,
        "namespace": str,
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": str},
    },
    "spec": {
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def misplaced(value, structure, where="manifest"):
    """Fields that the structure does not have, and values of another type."""
    if isinstance(structure, dict):
        if not isinstance(value, dict):
            return [f"{where} is no mapping"]
        known = [
            fault for name in value if name in structure for fault in misplaced(value[name], structure[name], name)
        ]
        return known + [f"{where}.{name}" for name in value if name not in structure]
    if isinstance(structure, list):
        if not isinstance(value, list):
            return [f"{where} is no list"]
        return [fault for item in value for fault in misplaced(item, structure[0], where)]
    return [] if type(value) is structure else [f"{where} is {value!r}"]


def gke(action, config, *flags, **environment):
    return run(SCRIPT, action, "--config", str(config), *flags, **environment)


def manifest(config):
    """The manifest of a dry run."""
    printed = gke("apply", config, "--dry-run")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert valid_bash(printed.stdout)
    return yaml.safe_load(printed.stdout.partition("<<'MANIFEST'\n")[2].removesuffix("MANIFEST\n"))


def job(config, index=0):
    return manifest(config)["spec"]["replicatedJobs"][index]["template"]["spec"]


def pod_command(config, index=0):
    """What the container of a job runs, as Kubernetes hands it on."""
    command = job(config, index)["template"]["spec"]["containers"][0]["command"]
    return [word.replace("$$", "$") for word in command]


def test_misplaced_fields_are_found():
    good = {"apiVersion": "a", "spec": {"replicatedJobs": [{"name": "x", "replicas": 1}]}}
    assert misplaced(good, JOB_SET) == []
    assert misplaced({"spec": {"replicatedJobs": [{"name": 1, "size": 2}]}}, JOB_SET) == [
        "name is 1",
        "replicatedJobs.size",
    ]
    assert misplaced({"spec": {"replicatedJobs": {}}}, JOB_SET) == ["replicatedJobs is no list"]


@pytest.mark.parametrize("spot", ["yes", "no"])
def test_manifest_has_the_structure_of_the_api(tmp_path, spot):
    generators = {"GENERATOR_SLICES": "2", "GENERATOR_TOPOLOGY": "v5e:2x2", "GENERATOR_ARGUMENTS": "(--wait '3 0')"}
    made = manifest(write_config(tmp_path, AWKWARD, SPOT=spot, **generators))
    assert misplaced(made, JOB_SET) == []
    assert (made["apiVersion"], made["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    learner, generator = made["spec"]["replicatedJobs"]
    assert (learner["name"], learner["replicas"], generator["name"], generator["replicas"]) == (
        "learner",
        1,
        "generator",
        2,
    )
    assert made["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["learner"]}
    for each in (learner, generator):
        pod = each["template"]["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "Never", "a Job with a podFailurePolicy needs that"
        assert ("cloud.google.com/gke-spot" in pod["nodeSelector"]) == (spot == "yes")
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"] == {"google.com/tpu": 4}


def test_what_is_done_with_each_exit_code(tmp_path):
    made = manifest(write_config(tmp_path))
    rules = job(write_config(tmp_path))["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {2: "FailJob", 130: "FailJob", 143: "Ignore"}
    assert all(rule["onExitCodes"]["operator"] == "In" for rule in rules if "onExitCodes" in rule)
    disruption = [rule for rule in rules if "onPodConditions" in rule]
    assert disruption == [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    failed = {"name": "badInput", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 10, "rules": [failed]}
    assert job(write_config(tmp_path))["backoffLimit"] == 0, "any other exit code ends the Job, and restarts the set"


@pytest.mark.parametrize(
    ("topology", "changes", "hosts", "chips", "accelerator"),
    [
        ("v6e:4x4", {}, 4, 4, "tpu-v6e-slice"),
        ("v5e:2x4", {"CHIPS_PER_HOST": "8"}, 1, 8, "tpu-v5-lite-podslice"),
        ("v5e:1x1", {}, 1, 1, "tpu-v5-lite-podslice"),
        ("v5p:4x4x8", {"LEARNER_SLICES": "3", "GRACE_S": "99"}, 32, 4, "tpu-v5p-slice"),
        ("v4:2x2x2", {}, 2, 4, "tpu-v4-podslice"),
    ],
)
def test_a_pod_for_each_host(tmp_path, topology, changes, hosts, chips, accelerator):
    config = write_config(tmp_path, LEARNER_TOPOLOGY=topology, **changes)
    assert manifest(config)["spec"]["replicatedJobs"][0]["replicas"] == int(changes.get("LEARNER_SLICES", 1))
    assert (job(config)["parallelism"], job(config)["completions"], job(config)["completionMode"]) == (
        hosts,
        hosts,
        "Indexed",
    )
    pod = job(config)["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == int(changes.get("GRACE_S", 300))
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology.partition(":")[2],
    }


def test_a_pod_fetches_the_source_and_runs_the_learner(tmp_path):
    config = write_config(tmp_path, AWKWARD, REPOSITORY=str(repository(tmp_path)))
    bash, flag, text = pod_command(config)
    text = text.replace("/tmp/m2po", str(tmp_path / "pod"))
    for _ in range(2):  # as well in a container that is started again
        subprocess.run([bash, flag, text], check=True, timeout=60)
    arguments = (tmp_path / "pod" / "arguments").read_text().split("\0")[:-1]
    assert arguments == ["train", *AWKWARD, "--run", "gs://bucket/of us/runs/run-1", "--distributed"]


@pytest.mark.parametrize("action", ["apply", "status", "logs", "delete"])
def test_dry_run_needs_nothing_and_can_be_pasted(tmp_path, action):
    printed = gke(action, write_config(tmp_path, AWKWARD), "--dry-run", PATH="/usr/bin:/bin")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert valid_bash(printed.stdout)
    first, second = printed.stdout.splitlines()[:2]
    assert first == "gcloud container clusters get-credentials some-cluster --location=us-east5 --project=some-project"
    assert second.startswith("kubectl --context=gke_some-project_us-east5_some-cluster --namespace=default ")


def test_apply_hands_over_the_manifest_of_the_dry_run(tmp_path):
    config = write_config(tmp_path, AWKWARD)
    applied = gke("apply", config, **cloud.with_cluster(tmp_path))
    assert applied.returncode == 0
    assert yaml.safe_load((tmp_path / "manifest").read_text()) == manifest(config)
    assert "it costs money until: " in applied.stderr


def test_delete_says_what_is_left(tmp_path):
    there = cloud.with_cluster(tmp_path)
    gone = gke("delete", write_config(tmp_path), **there)
    assert gone.returncode == 0
    assert "gke.sh: run-1 is deleted; the run stays in gs://bucket/of us/runs/run-1" in gone.stderr
    assert "node pools stay" in gone.stderr
    (tmp_path / "pods").write_text("pod/run-1-learner-0-0\npod/run-1-learner-0-1\n")
    left = gke("delete", write_config(tmp_path), **there)
    assert left.returncode == 1
    assert "may cost money: pod/run-1-learner-0-0 pod/run-1-learner-0-1\n" in left.stderr


def test_logs_are_of_the_first_host_or_of_all(tmp_path):
    there = cloud.with_cluster(tmp_path)
    for flags in ([], ["--all"]):
        assert gke("logs", write_config(tmp_path), *flags, **there).returncode == 0
    first, everything = [call for call in cloud.calls(tmp_path) if " logs " in call]
    assert f"--selector={LABEL},jobset.sigs.k8s.io/replicatedjob-name=learner," in first
    assert f"--selector={LABEL} " in everything


@pytest.mark.parametrize("name", ["CLUSTER", "CLUSTER_LOCATION"])
def test_a_missing_value_is_named(tmp_path, name):
    config = write_config(tmp_path, **{name: None})
    refused = gke("apply", config, "--dry-run")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith(f"gke.sh: {name} is not set in {config}: ")


def test_kubectl_that_is_not_installed_is_said(tmp_path):
    cloud.with_cluster(tmp_path)
    (tmp_path / "bin" / "kubectl").unlink()
    for needed in ("bash", "dirname", "sed", "env"):
        (tmp_path / "bin" / needed).symlink_to(shutil.which(needed))
    refused = gke("apply", write_config(tmp_path), PATH=str(tmp_path / "bin"))
    assert (refused.returncode, refused.stderr) == (
        2,
        "gke.sh: kubectl is not installed; --dry-run shows what would be run\n",
    )


def test_strings_are_strings(tmp_path):
    """A namespace of digits, and an image with quotes, stay strings."""
    config = write_config(tmp_path, NAMESPACE="123", IMAGE='a"b\\c', SERVICE_ACCOUNT="yes")
    made = manifest(config)
    pod = made["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert json.dumps(
        [made["metadata"]["namespace"], pod["containers"][0]["image"], pod["serviceAccountName"]]
    ) == json.dumps(["123", 'a"b\\c', "yes"])
