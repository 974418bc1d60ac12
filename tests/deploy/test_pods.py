"""Trains with the pods of the manifests: each pod on a host of its own, containers as the manifest says."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from conftest import ROOT, WORKER, Rendered, results
from containers import PATIENCE_S, Pod
from hosts import Hosts, run

KUBERNETES = ROOT / "compose" / "kubernetes"
MakeHosts = Callable[[Sequence[Sequence[str]]], Hosts]
JOB = "digits"


class Job:
    """The pods of a job."""

    def __init__(self, pods: list[Pod]) -> None:
        self.pods = pods

    def start(self) -> None:
        """Until all sidecars serve."""
        for pod in self.pods:
            pod.prepare()
        for pod in self.pods:
            pod.await_start("ronde-sidecar")

    def train(self, *arguments: str) -> list[tuple[int, str]]:
        """Runs the workers to their end; status and output of each pod's."""
        self.run(*arguments)
        return [self.outcome(pod) for pod in self.pods]

    def run(self, *arguments: str) -> None:
        """Starts the workers."""
        for pod in self.pods:
            container = dict(pod.container("node"))
            container["args"] = ["python", str(WORKER), *arguments]
            pod.start(container)

    def outcome(self, pod: Pod) -> tuple[int, str]:
        process = pod.running.pop("node")
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def end(self) -> list[dict[str, tuple[int, str]]]:
        return [pod.end() for pod in self.pods]


@pytest.fixture
def job(make_hosts: MakeHosts, folder: pathlib.Path, ronde: str) -> Iterator[Callable[..., Job]]:
    """Makes the pods of a job of two nodes."""
    made: list[Pod] = []

    def make(
        spec: dict[str, Any], secrets: dict[str, dict[str, bytes]], added: Callable[[int], dict[str, Any]] | None = None
    ) -> Job:
        # As the controllers name the pods: JOB-node-0-INDEX, in the domain of the headless service JOB.
        hosts = make_hosts([[f"{JOB}-node-0-{index}.{JOB}"] for index in range(2)])
        for index in range(2):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": JOB,
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            one = added(index) if added else {"*": {"JOB_COMPLETION_INDEX": str(index)}}
            made.append(Pod(hosts, index, spec, labels, folder / f"pod-{index}", secrets, one))
        return Job(list(made))

    yield make
    for pod in made:
        with contextlib.suppress(OSError):
            pod.kill()


@pytest.fixture
def job_secret(folder: pathlib.Path, ronde: str) -> dict[str, dict[str, bytes]]:
    assert run([ronde, "certs", "secret", str(folder / "job-secret")], 20).returncode == 0
    return {"ronde-job-secret": {"job-secret": (folder / "job-secret").read_bytes()}}


def spec_of(document: dict[str, Any]) -> dict[str, Any]:
    """The pods of a JobSet or a runtime."""
    jobset = document["spec"]["template"] if document["kind"] == "ClusterTrainingRuntime" else document
    spec: dict[str, Any] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return spec


def certificates(folder: pathlib.Path, ronde: str, *options: str) -> dict[str, bytes]:
    """The content of the Secret that the README makes."""
    made = run([ronde, "certs", "once", "--job", JOB, "--sidecars", "0-1", *options, str(folder)], 20)
    assert made.returncode == 0, made.stderr
    content = {
        f"sidecar-{index}-{name}": (folder / f"sidecar-{index}" / name).read_bytes()
        for index in range(2)
        for name in ["cert.pem", "key.pem"]
    }
    return {**content, "ca.pem": (folder / "sidecar-0" / "ca.pem").read_bytes()}


def issued_by_another(folder: pathlib.Path, uris: list[str]) -> list[dict[str, bytes]]:
    """The Secrets of certificates as cert-manager and SPIRE issue them.

    An ECDSA key in PKCS #8, no subject, and a URI as the only name, which is critical then.
    """
    folder.mkdir()
    usages = ["keyUsage=critical,digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
    extensions = "\n".join([*usages, "basicConstraints=critical,CA:FALSE", ""])

    def openssl(*words: str) -> None:
        done = run(["openssl", *words], 20, cwd=folder)
        assert done.returncode == 0, done.stderr

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    usage = ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    openssl(
        "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "1", "-subj", "/CN=issuer", *usage
    )
    found = []
    for index, uri in enumerate(uris):
        openssl("req", *new_key, "-keyout", f"{index}.key", "-out", f"{index}.csr", "-subj", "/")
        (folder / f"{index}.ext").write_text(f"subjectAltName=critical,URI:{uri}\n{extensions}")
        authority = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1"]
        openssl("x509", "-req", "-in", f"{index}.csr", *authority, "-extfile", f"{index}.ext", "-out", f"{index}.crt")
        parts = {"tls.crt": f"{index}.crt", "tls.key": f"{index}.key", "ca.crt": "ca.crt"}
        found.append({key: (folder / name).read_bytes() for key, name in parts.items()})
    return found


def assert_trained(outcomes: list[tuple[int, str]], workers: int) -> None:
    found = results("\n".join(output for _, output in outcomes))
    assert [status for status, _ in outcomes] == [0, 0], outcomes
    assert [result["rank"] for result in found] == list(range(2 * workers))
    assert [result["local_rank"] for result in found] == [*range(workers), *range(workers)]
    assert {result["uid"] for result in found} == {10002}


def assert_ended_in_order(outcomes: list[dict[str, tuple[int, str]]]) -> None:
    for outcome in outcomes:
        assert [status for status, _ in outcome.values()] == [0] * len(outcome), outcome


def test_a_jobset_trains(job: Any, job_secret: Any, rendered: Rendered) -> None:
    jobset = rendered("jobset", "workersPerNode=2", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    private = trained.pods[0].folder / "ronde-private" / "credentials"
    assert (private / "job-secret").stat().st_mode & 0o777 == 0o400
    assert (private / "job-secret").stat().st_uid == 10001
    assert_trained(trained.train(), 2)
    assert_ended_in_order(trained.end())


def test_a_train_job_trains(job: Any, job_secret: Any, rendered: Rendered) -> None:
    """As Kubeflow Trainer joins runtime and TrainJob: command and image of the TrainJob, PET_* by envInjection."""
    runtime = rendered("trainer", name="ronde-torch")["ClusterTrainingRuntime"][0]
    train_job = rendered.read(KUBERNETES / "trainjob.yaml")["TrainJob"][0]
    assert train_job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert train_job["metadata"]["name"] == JOB
    trainer = train_job["spec"]["trainer"]
    spec = spec_of(runtime)
    spec["containers"][0] |= {"command": trainer["command"], "args": trainer["args"], "image": trainer["image"]}
    (target,) = runtime["spec"]["mlPolicy"]["torch"]["envInjection"]["targets"]
    assert target["jobName"] == "node"

    def added(index: int) -> dict[str, dict[str, str]]:
        variables = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{JOB}-node-0-0.{JOB}",
            "PET_MASTER_PORT": "29500",
        }
        return dict.fromkeys([*target["containerNames"], "node"], variables)

    trained = job(spec, job_secret, added)
    trained.start()
    assert_trained(trained.train(), 2)
    assert_ended_in_order(trained.end())


@pytest.mark.heavy
def test_certificates_are_renewed_while_a_job_runs(
    job: Any, folder: pathlib.Path, ronde: str, rendered: Rendered
) -> None:
    jobset = rendered("jobset", "credentials.kind=certificates", name=JOB)["JobSet"][0]
    first = certificates(folder / "first", ronde)
    trained = job(spec_of(jobset), {"ronde-job-secret": first})
    trained.start()
    keys = [pod.folder / "ronde-private" / "credentials" / "key.pem" for pod in trained.pods]
    assert [key.read_bytes() for key in keys] == [first["sidecar-0-key.pem"], first["sidecar-1-key.pem"]]
    # Both authorities are accepted between the old and the new certificates.
    second = certificates(folder / "second", ronde)
    both = first["ca.pem"] + second["ca.pem"]
    for content in ({**first, "ca.pem": both}, {**second, "ca.pem": both}):
        for pod in trained.pods:
            pod.write_secret(pod.folder / "ronde-secret", content, 0o440)
        deadline = time.monotonic() + PATIENCE_S
        expected = [content["sidecar-0-key.pem"], content["sidecar-1-key.pem"]]
        while [key.read_bytes() for key in keys] != expected or keys[0].with_name("ca.pem").read_bytes() != both:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    time.sleep(3)  # A sidecar reads changed files within a second or two.
    assert_trained(trained.train(), 1)
    outcomes = trained.end()
    assert_ended_in_order(outcomes)
    for outcome in outcomes:
        assert "cannot be used" not in outcome["ronde-sidecar"][1], outcome


@pytest.mark.heavy
def test_certificates_of_cert_manager(job: Any, folder: pathlib.Path, rendered: Rendered) -> None:
    """The JobSet and the Certificates of the chart, with an issuer that is not ronde."""
    objects = rendered("jobset", "credentials.kind=cert-manager", name=JOB)
    wanted = [certificate["spec"] for certificate in objects["Certificate"]]
    secrets = issued_by_another(folder / "issuer", [uri for spec in wanted for uri in spec["uris"]])
    named = {spec["secretName"]: secret for spec, secret in zip(wanted, secrets)}
    trained = job(spec_of(objects["JobSet"][0]), named)
    trained.start()
    held = trained.pods[1].folder / "ronde-private" / "credentials"
    assert (held / "key.pem").read_bytes() == secrets[1]["tls.key"]
    assert_trained(trained.train(), 1)
    assert_ended_in_order(trained.end())


@pytest.mark.heavy
def test_certificates_of_spire(job: Any, folder: pathlib.Path, rendered: Rendered) -> None:
    """The files are where and with the modes that the chart's helper.conf says; this test plays spiffe-helper."""
    objects = rendered("jobset", "credentials.kind=spiffe", name=JOB)
    written = objects["ConfigMap"][0]["data"]["helper.conf"]
    settings = dict(line.split(" = ") for line in written.strip().splitlines())
    settings = {name: value.strip('"') for name, value in settings.items()}
    assert settings["cert_dir"] == "/run/ronde-private/credentials"
    spec = spec_of(objects["JobSet"][0])
    # The helper's container is not started, and its volumes do not exist here.
    spec["volumes"] = [volume for volume in spec["volumes"] if "spiffe" not in volume["name"]]
    (helper,) = [container for container in spec["initContainers"] if container["name"] == "spiffe-helper"]
    spec["initContainers"].remove(helper)
    trained = job(spec, {})
    uris = [f"spiffe://example.org/job/{JOB}/sidecar/{index}" for index in range(2)]
    for pod, files in zip(trained.pods, issued_by_another(folder / "issuer", uris)):
        place = pod.folder / "ronde-private" / "credentials"
        place.mkdir(mode=0o700)
        os.chown(place, helper["securityContext"]["runAsUser"], -1)
        for kind, content, mode in [
            ("svid", "tls.crt", "cert"),
            ("svid_key", "tls.key", "key"),
            ("svid_bundle", "ca.crt", "cert"),
        ]:
            path = place / settings[f"{kind}_file_name"]
            path.write_bytes(files[content])
            path.chmod(int(settings[f"{mode}_file_mode"], 8))
            os.chown(path, helper["securityContext"]["runAsUser"], -1)
    trained.start()
    assert_trained(trained.train(), 1)
    assert_ended_in_order(trained.end())


@pytest.mark.heavy
def test_a_lost_worker_is_named_in_the_other_pod(job: Any, job_secret: Any, rendered: Rendered) -> None:
    jobset = rendered("jobset", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    (first, text), (second, _) = trained.train("--fail-rank", "1")
    assert (first, second) == (1, 7)
    assert "rank 1" in text, text


@pytest.mark.heavy
def test_pods_may_end_one_after_the_other(job: Any, job_secret: Any, rendered: Rendered) -> None:
    """The kubelet ends a sidecar with its pod's workers, while another pod still saves its checkpoint."""
    jobset = rendered("jobset", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    trained.run("--linger", "20")
    first, second = trained.pods
    outcome = trained.outcome(first)
    ended = first.end()
    assert second.running["node"].poll() is None, "the other pod was to end later"
    assert_trained([outcome, trained.outcome(second)], 1)
    assert_ended_in_order([ended, second.end()])


@pytest.mark.heavy
def test_a_pod_with_another_secret_stays_out(
    job: Any, job_secret: Any, folder: pathlib.Path, ronde: str, rendered: Rendered
) -> None:
    jobset = rendered("jobset", "sidecar.startTimeout=5", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    assert run([ronde, "certs", "secret", str(folder / "other")], 20).returncode == 0
    pod = trained.pods[1]
    pod.write_secret(pod.folder / "ronde-secret", {"job-secret": (folder / "other").read_bytes()}, 0o440)
    for each in trained.pods:
        each.prepare()
    time.sleep(8)
    outcomes = trained.end()
    text = "".join(outcome["ronde-sidecar"][1] for outcome in outcomes)
    assert "not signed by an authority of this job" in text, text


def test_a_worker_cannot_change_the_sockets_nor_read_the_keys(job: Any, job_secret: Any, rendered: Rendered) -> None:
    jobset = rendered("jobset", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    pod = trained.pods[0]
    node = pod.container("node")

    def refused(command: str) -> str:
        done = run(pod.command(node, ["sh", "-c", command]), 20, env={})
        assert done.returncode != 0, f"{command}: {done.stdout}"
        return done.stderr

    assert "Read-only file system" in refused("touch /run/ronde/new")
    assert "Read-only file system" in refused("rm /run/ronde/rpc.sock")
    assert "No such file" in refused("ls /run/ronde-private") + refused("ls /run/ronde-secret")
    sidecar = trained.pods[0].running["ronde-sidecar"].pid
    assert "Permission denied" in refused(f"cat /proc/{sidecar}/root/run/ronde-private/credentials/job-secret")
    # It can do what it is for.
    done = run(pod.command(node, ["sh", "-c", "ls /run/ronde && cat /run/ronde/rank-0.token >/dev/null"]), 20, env={})
    assert done.returncode == 0, done.stderr
    assert {"rpc.sock", "mem.sock", "rank-0.token"} <= set(done.stdout.split())
    trained.end()


@pytest.mark.heavy
def test_metrics_are_on_the_address_of_the_pod(job: Any, job_secret: Any, rendered: Rendered) -> None:
    jobset = rendered("jobset", "metrics.enabled=true", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    code = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())"
    hosts = trained.pods[1].hosts
    url = f"http://{hosts.names[0][0]}:9400/metrics"
    done = run(hosts.on(1, ["python3", "-c", code, url]), 20, env=dict(os.environ))
    assert "ronde_suspect_sidecars" in done.stdout, done.stderr
    sidecar = trained.pods[0].container("ronde-sidecar")
    status = run(trained.pods[0].command(sidecar, sidecar["readinessProbe"]["exec"]["command"]), 20, env={})
    assert json.loads(status.stdout)["world_size"] == 2, status.stderr
    assert_ended_in_order(trained.end())


@pytest.mark.heavy
def test_a_sidecar_that_starts_again_uses_its_directory(job: Any, job_secret: Any, rendered: Rendered) -> None:
    """The kubelet starts a native sidecar again, with the same volumes."""
    jobset = rendered("jobset", name=JOB)["JobSet"][0]
    trained = job(spec_of(jobset), job_secret)
    trained.start()
    for pod in trained.pods:
        pod.running["ronde-sidecar"].kill()
        pod.running["ronde-sidecar"].communicate(timeout=10)
    for pod in trained.pods:
        pod.start(pod.container("ronde-sidecar"))
    for pod in trained.pods:
        pod.await_start("ronde-sidecar")
    assert_trained(trained.train(), 1)
    assert_ended_in_order(trained.end())
