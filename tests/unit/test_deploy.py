"""The manifests under deploy/ say what their operators' published schemas ask for.

The schemas are half a megabyte each, most of it Kubernetes's pods, and are not ours to keep here. What is checked are
the facts of them that these manifests touch: which fields exist, which are required, what they may hold, and the names
that the operators look for.
"""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from manyhands.cli.main import COMMANDS
from manyhands.serving.batching import BatchLimits
from manyhands.serving.routes import MODEL_ROUTES

yaml = pytest.importorskip("yaml", reason="PyYAML reads the manifests")

DEPLOY = Path(__file__).resolve().parent.parent.parent / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

RUN_POLICY = {
    "cleanPodPolicy": ("All", "Running", "None"),
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "schedulingPolicy": dict,
}
REPLICA = {
    "replicas": int,
    "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
    "template": dict,
}
START = {"rayStartParams": dict, "template": dict}
HEAD = {**START, "serviceType": str, "headService": dict, "enableIngress": bool}
GROUP = {
    **START,
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "numOfHosts": int,
    "scaleStrategy": dict,
}
CLUSTER = {
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
    "rayVersion": str,
    "enableInTreeAutoscaling": bool,
    "autoscalerOptions": dict,
    "suspend": bool,
}
JOB = {
    "entrypoint": str,
    "rayClusterSpec": dict,
    "runtimeEnvYAML": str,
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode"),
    "shutdownAfterJobFinishes": bool,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
}
DEPLOYMENT = {"replicas": int, "selector": dict, "template": dict, "strategy": dict, "minReadySeconds": int}
SERVICE = {"selector": dict, "ports": list, "type": ("ClusterIP", "NodePort", "LoadBalancer")}
PROBE = {
    "httpGet": dict,
    "periodSeconds": int,
    "timeoutSeconds": int,
    "failureThreshold": int,
    "initialDelaySeconds": int,
}
VERSIONS = {"Deployment": "apps/v1", "Service": "v1", "RayJob": "ray.io/v1", "RayCluster": "ray.io/v1"}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def problems(manifest: Any) -> list[str]:
    """What an operator would refuse, or never look at."""
    kind, spec = manifest.get("kind"), manifest.get("spec", {})
    found = []
    if not NAME.fullmatch(manifest.get("metadata", {}).get("name", "")):
        found.append("metadata.name is no name of a resource")
    version = VERSIONS.get(str(kind), "kubeflow.org/v1")
    if manifest.get("apiVersion") != version:
        found.append(f"apiVersion is not {version}")
    match kind:
        case "PyTorchJob":
            fields = {
                "pytorchReplicaSpecs": dict,
                "runPolicy": dict,
                "nprocPerNode": str,
                "elasticPolicy": dict,
            }
            found += against(spec, fields, ["pytorchReplicaSpecs"], "spec")
            found += replicas(spec.get("pytorchReplicaSpecs", {}), ("Master", "Worker"), "Master", "pytorch")
        case "TFJob":
            fields = {
                "tfReplicaSpecs": dict,
                "runPolicy": dict,
                "successPolicy": str,
                "enableDynamicWorker": bool,
            }
            found += against(spec, fields, ["tfReplicaSpecs"], "spec")
            roles = ("Chief", "Master", "PS", "Worker", "Evaluator")
            found += replicas(spec.get("tfReplicaSpecs", {}), roles, "Chief", "tensorflow")
        case "RayCluster":
            found += ray_cluster(spec, "spec")
        case "RayJob":
            found += against(spec, JOB, ["entrypoint", "rayClusterSpec"], "spec")
            found += ray_cluster(spec.get("rayClusterSpec", {}), "spec.rayClusterSpec")
        case "Deployment":
            found += against(spec, DEPLOYMENT, ["selector", "template"], "spec")
            found += deployment(spec)
        case "Service":
            found += against(spec, SERVICE, ["selector", "ports"], "spec")
        case _:
            found.append(f"kind is {kind}")
    return [*found, *against(spec.get("runPolicy", {}), RUN_POLICY, [], "spec.runPolicy")]


def against(value: Any, fields: dict[str, Any], required: list[str], where: str) -> list[str]:
    """Fields that are missing, unknown, or of another kind."""
    if not isinstance(value, dict):
        return [f"{where} is no mapping"]
    found = [f"{where}.{name} is missing" for name in required if name not in value]
    for name, held in value.items():
        allowed = fields.get(name)
        if allowed is None:
            found.append(f"{where}.{name} is not known")
        elif isinstance(allowed, tuple):
            found += [f"{where}.{name} is {held!r}"] if held not in allowed else []
        elif not isinstance(held, allowed) or (allowed is int and isinstance(held, bool)):
            found.append(f"{where}.{name} is {held!r}, no {allowed.__name__}")
    return found


def replicas(specs: Any, roles: tuple[str, ...], leader: str, container: str) -> list[str]:
    """Of the training operator; it looks for a container of one name in every pod."""
    found = [f"{role} is no role" for role in specs if role not in roles]
    if specs.get(leader, {}).get("replicas") != 1:
        found.append(f"{leader} must be one")
    for role, spec in specs.items():
        found += against(spec, REPLICA, ["template"], role)
        found += pod(spec.get("template", {}), container, role)
    return found


def ray_cluster(spec: Any, where: str) -> list[str]:
    found = against(spec, CLUSTER, ["headGroupSpec"], where)
    head = spec.get("headGroupSpec", {})
    found += against(head, HEAD, ["rayStartParams", "template"], f"{where}.headGroupSpec")
    found += pod(head.get("template", {}), "ray-head", f"{where}.headGroupSpec")
    for number, group in enumerate(spec.get("workerGroupSpecs", [])):
        place = f"{where}.workerGroupSpecs[{number}]"
        needed = ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"]
        found += against(group, GROUP, needed, place)
        found += pod(group.get("template", {}), "ray-worker", place)
        if not group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0):
            found.append(f"{place}.replicas is not between minReplicas and maxReplicas")
        found += [
            f"{place}: {value!r}" for value in group["rayStartParams"].values() if not isinstance(value, str)
        ]
    return found


def deployment(spec: Any) -> list[str]:
    """Probes ask addresses that need no token, on a port that the container has; the selector finds the pods."""
    template = spec.get("template", {})
    found, volumes = container_of(template, "model", "spec.template")
    labels = template.get("metadata", {}).get("labels", {})
    if not spec.get("selector", {}).get("matchLabels", {}).items() <= labels.items():
        found.append("spec.selector finds no pod of the template")
    first = template["spec"]["containers"][0]
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        found += against(first.get(name), PROBE, ["httpGet"], name)
        asked = (first.get(name) or {}).get("httpGet", {})
        route = MODEL_ROUTES.get(asked.get("path"))
        if route is None or route.needs_token or route.method != "GET":
            found.append(f"{name} asks {asked.get('path')}, which does not answer it")
        if asked.get("port") not in {port["name"] for port in first.get("ports", [])}:
            found.append(f"{name}: the container has no port {asked.get('port')}")
    ports = [str(port["containerPort"]) for port in first.get("ports", [])]
    if f"--port={ports[0]}" not in first["args"] or "--host=0.0.0.0" not in first["args"]:
        found.append("the server does not listen where it is asked")
    return found + [f"{name} is no volume" for name, one in volumes.items() if len(one) != 2]


def container_of(template: Any, container: str, where: str) -> tuple[list[str], dict[str, Any]]:
    spec = template.get("spec", {})
    first = (spec.get("containers") or [{}])[0]
    found = [] if first.get("name") == container else [f"{where}: the first container is not {container}"]
    found += [f"{where}: no image"] if not first.get("image") else []
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    mounted = {mount["name"] for mount in first.get("volumeMounts", [])}
    found += [f"{where}: nothing is called {name}" for name in mounted - set(volumes)]
    return found, volumes


def pod(template: Any, container: str, where: str) -> list[str]:
    found, volumes = container_of(template, container, where)
    if volumes.get("tls", {}).get("secret", {}).get("defaultMode") != 0o400:
        found.append(f"{where}: others may read the key")
    return found


def load(path: Path) -> Any:
    (document,) = yaml.safe_load_all(path.read_text())
    return document


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_fits_what_its_operator_reads(path: Path) -> None:
    assert problems(load(path)) == []


def test_every_kind_is_there() -> None:
    kinds = {"PyTorchJob", "TFJob", "RayJob", "RayCluster", "Deployment", "Service"}
    assert {load(path)["kind"] for path in MANIFESTS} == kinds


def test_the_service_reaches_the_pods_of_the_deployment_by_a_name_that_they_answer_to() -> None:
    served, service = (load(DEPLOY / "kubernetes" / f"{name}.yaml") for name in ("serve", "serve-service"))
    pods = served["spec"]["template"]
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    container = pods["spec"]["containers"][0]
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    (names,) = (word.removeprefix("--names=").split(",") for word in container["args"] if "--names" in word)
    assert {name.partition(".")[0] for name in names} == {service["metadata"]["name"]}
    (token,) = container["env"]
    assert token["name"] == "MANYHANDS_TOKEN"
    assert "value" not in token, "it comes from a secret"


def test_a_pod_has_the_time_to_answer_what_has_come() -> None:
    pods = load(DEPLOY / "kubernetes" / "serve.yaml")["spec"]["template"]["spec"]
    (_, before) = pods["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert pods["terminationGracePeriodSeconds"] > int(before) + BatchLimits().deadline_s + 10


def served_container(spec: Any) -> Any:
    return spec["template"]["spec"]["containers"][0]


def spoiled() -> Iterator[tuple[str, Callable[[Any], Any], str]]:
    yield "pytorchjob", lambda spec: spec.update(replicas=2), "spec.replicas is not known"
    yield "pytorchjob", lambda spec: spec.pop("pytorchReplicaSpecs"), "spec.pytorchReplicaSpecs is missing"
    yield "pytorchjob", lambda spec: spec.update(nprocPerNode=1), "spec.nprocPerNode is 1, no str"
    yield "tfjob", lambda spec: spec["tfReplicaSpecs"]["Chief"].update(replicas=2), "Chief must be one"
    yield "tfjob", lambda spec: spec["tfReplicaSpecs"].update(Server={}), "Server is no role"
    yield (
        "tfjob",
        lambda spec: spec["tfReplicaSpecs"]["PS"].update(restartPolicy="Sometimes"),
        "PS.restartPolicy",
    )
    yield "raycluster", lambda spec: spec["headGroupSpec"].pop("rayStartParams"), "rayStartParams is missing"
    yield "raycluster", lambda spec: spec["workerGroupSpecs"][0].update(replicas=9), "is not between"
    yield "serve", lambda spec: spec.update(pods=2), "spec.pods is not known"
    yield "serve", lambda spec: spec["selector"].update(matchLabels={"app": "x"}), "finds no pod"
    yield "serve", lambda spec: served_container(spec).pop("livenessProbe"), "livenessProbe is no mapping"
    yield (
        "serve",
        lambda spec: served_container(spec)["readinessProbe"]["httpGet"].update(path="/metrics"),
        "readinessProbe asks /metrics",
    )
    yield "serve", lambda spec: served_container(spec)["args"].remove("--port=8000"), "does not listen"
    yield "serve-service", lambda spec: spec.pop("ports"), "spec.ports is missing"
    yield "rayjob", lambda spec: spec.update(entryPoint="x"), "spec.entryPoint is not known"


@pytest.mark.parametrize(("name", "spoil", "sentence"), list(spoiled()))
def test_what_would_be_refused_is_found(name: str, spoil: Callable[[Any], Any], sentence: str) -> None:
    manifest = copy.deepcopy(load(DEPLOY / "kubernetes" / f"{name}.yaml"))
    spoil(manifest["spec"])
    assert any(sentence in found for found in problems(manifest)), problems(manifest)


def test_the_batch_script_is_a_script() -> None:
    script = DEPLOY / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=240)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1", "torchrun starts the workers of a node"
    assert int(options["nodes"]) > 1


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every `manyhands …` that a manifest, the script or the page on machines says, as words."""
    for path in MANIFESTS:
        spec = load(path)["spec"]
        for role, replica in (spec.get("pytorchReplicaSpecs") or spec.get("tfReplicaSpecs") or {}).items():
            container = replica["template"]["spec"]["containers"][0]
            yield f"{path.stem} {role}", [*container["command"], *container["args"]]
        if "replicas" in spec:
            container = served_container(spec)
            yield path.stem, [*container["command"], *container["args"]]
        if "entrypoint" in spec:
            yield path.stem, shlex.split(spec["entrypoint"])
    for path in (
        DEPLOY / "slurm" / "train.sbatch",
        DEPLOY / "README.md",
        DEPLOY.parent / "docs" / "machines.md",
        DEPLOY / "kubernetes" / "raycluster.yaml",
    ):
        text = re.sub(r"\\\n#?", " ", path.read_text())
        for number, found in enumerate(
            re.findall(r"^[^|`\n]*?\bmanyhands ((?:train|certificates|role|watch) .*)", text, re.M)
        ):
            words = shlex.split(found.partition(" && ")[0], comments=True)
            yield f"{path.name} {number}", ["manyhands", *words]


def parse(program: str, name: str, *words: str) -> None:
    """As the command line would, up to where it would begin; raises for what it does not know."""
    assert program == "manyhands"
    found = COMMANDS[name].load()
    if isinstance(found, typer.Typer):
        task, *words = words
        command: Any = typer.main.get_group(found).commands[task]
    else:
        alone = typer.Typer()
        alone.command(name)(found)
        command = typer.main.get_command(alone)
    command.make_context(name, list(words))


@pytest.mark.parametrize(("where", "words"), list(commands()))
def test_commands_are_those_of_the_command_line(where: str, words: list[str]) -> None:
    parse(*words)
    end = words.index("--") if "--" in words else len(words)
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parse(*words[:end], "--nonsense", *words[end:])
