"""A small CI core: builds that check a resource, get its newest version, run a task and put the result.

Each step leases a worker and drives a container on it. docs/ci-core.md explains each part."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import queue
import threading
import time
import uuid

import grpc

from client import BREAK_AFTER, HERE, TEAM, Client, connect, containers_pb2, containers_pb2_grpc, error_info
from client import artifacts_pb2, artifacts_pb2_grpc, placements_pb2, workloads_pb2
from gantry.artifacts.v1 import caches_pb2, caches_pb2_grpc, trees_pb2
from gantry.scheduler.v1 import workers_pb2, workers_pb2_grpc
from google.protobuf import duration_pb2

# A caller may send this many bytes of input more than the process has accepted.
INPUT_WINDOW = 1 << 20
# Scripts of the resource type, of the tasks and of the service.
SCRIPTS = HERE / "../ci"
# Port of the service beside the task.
SERVICE_PORT = 5432
# Maximum number of repeats of a call that is not answered. They take two minutes.
MAX_REPEATS = 60
NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


# docs:repeat
def repeat(call):
    """Returns the result of a call, which is repeated while the service does not answer.

    A repeat is safe because the caller chooses all ids before the first call."""
    for repeats in itertools.count():
        try:
            return call()
        except grpc.RpcError as error:
            wait_after(error, repeats)


def wait_after(error, repeats):
    """Waits before the next repeat of a call that was not answered. Raises any other error."""
    if error.code() not in NO_ANSWER or repeats == MAX_REPEATS:
        raise error
    time.sleep(min(0.1 * 2**repeats, 2))


def last(stream, kind):
    """Returns the last message of a stream that reports progress before it."""
    for message in stream:
        if message.WhichOneof("message") == kind:
            return getattr(message, kind)
    raise RuntimeError(f"the stream ended without {kind}")


@contextlib.contextmanager
def renewed(term, renew):
    """Calls `renew` three times in each term until the end of the block.

    The loop ends when the renewal is rejected. Then the next call under the lease or claim is rejected, too."""
    ended = threading.Event()

    def loop():
        while not ended.wait(term.ToMilliseconds() / 3000):
            try:
                repeat(renew)
            except grpc.RpcError:
                return

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
# docs:end


def script(name):
    return (SCRIPTS / name).read_text()


class StepFailed(Exception):
    """The main process of a step did not exit with 0."""

    def __init__(self, step, result):
        super().__init__(f"{step} ended with {result.exited}, stderr {bytes(result.stderr)!r}")
        self.result = result


@dataclasses.dataclass
class Result:
    """End and output of a process."""

    exited: containers_pb2.Exited
    stdout: bytearray
    stderr: bytearray
    connections: int

    @property
    def succeeded(self):
        return self.exited.WhichOneof("status") == "code" and self.exited.code == 0


class Core(Client):
    """The services, and the settings that all steps share."""

    def __init__(self):
        super().__init__()
        store = connect(self.addresses["artifacts"])
        self.artifacts = artifacts_pb2_grpc.ArtifactsStub(store)
        self.caches = caches_pb2_grpc.CachesStub(store)
        # Host workers run steps with their own programs. Other workers need an image.
        self.image = os.environ.get("GANTRY_CI_IMAGE", "")
        self.tags = os.environ.get("GANTRY_CI_TAGS", "").split()
        self.has_services = self.can_join_networks()
        # Artifact with the scripts of the resource type. Without an owner, it is deleted after 12 h.
        self.type_artifact = str(uuid.uuid4())
        entries = [
            trees_pb2.SmallTreeEntry(path=name.encode(), file=script(name).encode()) for name in ("check", "in", "out")
        ]
        created = artifacts_pb2.CreateArtifactRequest(
            artifact_id=self.type_artifact, team=TEAM, label="counter", tree=trees_pb2.SmallTree(entries=entries)
        )
        self.type_digest = self.call(self.artifacts.CreateArtifact, created).digest

    def call(self, method, request):
        return repeat(lambda: method(request, metadata=self.auth))

    # docs:capability
    def can_join_networks(self):
        """Returns whether a worker with the tags of this core lets a task share the network of a service."""
        workers = workers_pb2_grpc.WorkersStub(connect(self.addresses["scheduler"]))
        known = self.call(workers.ListWorkers, workers_pb2.ListWorkersRequest()).workers
        labels = [worker.labels for worker in known if sorted(worker.labels.tags) == sorted(self.tags)]
        return any("network-container" in label.capabilities for label in labels)
    # docs:end

    # docs:spec
    def spec(self, inputs=(), outputs=(), caches=(), network=workloads_pb2.NETWORK_NONE):
        """Returns the spec of a container: inputs and caches by their paths, outputs by their names."""
        image = workloads_pb2.Image(host=workloads_pb2.HostImage())
        if self.image:
            image = workloads_pb2.Image(artifact_id=self.image)
            # A Concourse worker has no other network.
            network = workloads_pb2.NETWORK_PRIVATE
        return containers_pb2.ContainerSpec(
            image=image,
            inputs=[
                workloads_pb2.Input(
                    name=path.strip("/").replace("/", "-"),
                    artifact_id=artifact_id,
                    path=path.encode(),
                    access=workloads_pb2.ACCESS_READ_ONLY,
                )
                for path, artifact_id in dict(inputs).items()
            ],
            outputs=[workloads_pb2.Output(name=name) for name in outputs],
            caches=[
                workloads_pb2.CacheMount(path=path.encode(), task_cache_id=cache_id)
                for path, cache_id in dict(caches).items()
            ],
            privilege=workloads_pb2.PRIVILEGE_CONFINED,
            network=network,
        )
    # docs:end


class Worker:
    """The processes on one worker."""

    def __init__(self, core, worker_id, gateway_endpoint):
        self.core, self.worker_id = core, worker_id
        self.gateway = core.gateway(gateway_endpoint)
        self.containers = containers_pb2_grpc.ContainersStub(self.gateway)

    # docs:process
    def exec(self, container_id, command, stdin):
        """Runs a further process in a running container."""
        return self.start(container_id, str(uuid.uuid4()), "", command, stdin)

    def start(self, container_id, process_id, token, command, stdin, **options):
        """Starts a process, sends its input, and returns its whole output and its end."""
        spec = containers_pb2.ProcessSpec(command=[word.encode() for word in command], stdin=bool(stdin))
        address = self.address(process_id)
        start = containers_pb2.StartProcess(container_id=container_id, spec=spec, lease_token=token, **address)
        # It is repeated until it is answered. A process that exists is attached to, and not started again.
        return self.drive(address, containers_pb2.AttachRequest(start=start), stdin, **options)

    def address(self, process_id):
        return {"team": TEAM, "worker_id": self.worker_id, "process_id": process_id}

    def drive(self, address, first, stdin=b"", break_after=None, heard=None):
        """Attaches to a process with the message `first`, sends its input, and returns its whole output and its end.

        Broken calls are resumed. A test sets `break_after` to break the first call after this much output. `heard` is
        called with the standard output so far."""
        result = Result(None, bytearray(), bytearray(), 0)
        outputs = {containers_pb2.STREAM_STDOUT: result.stdout, containers_pb2.STREAM_STDERR: result.stderr}
        repeats = 0
        while True:
            result.connections += 1
            requests = queue.SimpleQueue()
            requests.put(first)
            call = self.containers.Attach(iter(requests.get, None), metadata=self.core.auth)
            try:
                for said in call:
                    repeats = 0
                    match said.WhichOneof("message"):
                        case "started":
                            written = said.started.stdin_offset
                            written = self.write(requests, stdin, written, written)
                        case "stdin_ack":
                            written = self.write(requests, stdin, written, said.stdin_ack.offset)
                        case "output":
                            output = outputs[said.output.stream]
                            assert said.output.offset == len(output), "out of order"
                            output += said.output.data
                            # Without an acknowledgement, the process blocks after 32 MiB.
                            offsets = {"stdout_offset": len(result.stdout), "stderr_offset": len(result.stderr)}
                            requests.put(containers_pb2.AttachRequest(ack=containers_pb2.Ack(**offsets)))
                            if heard:
                                heard(result.stdout)
                        case "truncated":
                            raise RuntimeError(f"output is lost: {said.truncated}")
                        case "exited":
                            result.exited = said.exited
                        case "done":
                            return result
                    # From here on, the process exists. `resume` continues at the received offsets.
                    offsets = {"stdout_offset": len(result.stdout), "stderr_offset": len(result.stderr)}
                    first = containers_pb2.AttachRequest(resume=containers_pb2.Resume(**address, **offsets))
                    if break_after is not None and result.connections == 1 and len(result.stdout) >= break_after:
                        break
            except grpc.RpcError as error:
                wait_after(error, repeats)
                repeats += 1
            finally:
                requests.put(None)
                call.cancel()

    @staticmethod
    def write(requests, stdin, written, accepted):
        """Sends input beyond `written` within the window, closes the input at its end, and returns how much is sent."""
        if written is None:
            return None
        while written < min(len(stdin), accepted + INPUT_WINDOW):
            data = stdin[written : min(written + (64 << 10), accepted + INPUT_WINDOW)]
            requests.put(containers_pb2.AttachRequest(stdin=containers_pb2.StdinData(offset=written, data=data)))
            written += len(data)
        if stdin and written == len(stdin):
            requests.put(containers_pb2.AttachRequest(close_stdin=containers_pb2.CloseStdin()))
            return None
        return written
    # docs:end


# docs:lease
@contextlib.contextmanager
def leased(core, kind, spec, capabilities=("exec",)):
    """Leases a worker with capabilities for one step, and renews the lease until the end of the block.

    A block that does not settle the lease releases it. Nothing that the step made is kept."""
    has_image = spec.image.WhichOneof("source") == "artifact_id"
    used = {value.artifact_id for value in spec.inputs} | ({spec.image.artifact_id} if has_image else set())
    network = "network-private" if spec.network == workloads_pb2.NETWORK_PRIVATE else "network-none"
    request = placements_pb2.PlaceRequest(
        lease_id=str(uuid.uuid4()),
        team=TEAM,
        kind=kind,
        tags=core.tags,
        # Only workers that can run such a container are feasible.
        process=placements_pb2.ProcessRequirements(
            image_kind="artifact" if has_image else "host",
            capabilities=[network, *capabilities],
        ),
        # They are pinned until the lease ends, and a worker that has them is preferred.
        artifact_ids=sorted(used),
        task_cache_ids=[value.task_cache_id for value in spec.caches],
        wait=duration_pb2.Duration(seconds=600),
    )
    placed = core.call(core.placements.Place, request)
    lease = Lease(core, placed, spec)
    with renewed(placed.term, lease.renew):
        try:
            yield lease
        finally:
            if not lease.settled:
                core.call(core.placements.Release, placements_pb2.ReleaseRequest(lease_token=placed.lease_token))
            lease.gateway.close()


class Lease(Worker):
    """The right to run the containers of one step on one worker."""

    def __init__(self, core, placed, spec):
        super().__init__(core, placed.worker_id, placed.gateway_endpoint)
        self.spec, self.token, self.settled = spec, placed.lease_token, False

    def renew(self):
        self.core.placements.Renew(placements_pb2.RenewRequest(lease_token=self.token), metadata=self.core.auth)
    # docs:end

    # docs:container
    def create(self, key="step", spec=None):
        """Creates the container of the step, or another one of its lease, and returns its id."""
        request = containers_pb2.CreateContainerRequest(lease_token=self.token, key=key, spec=spec or self.spec)
        stream = lambda: self.containers.CreateContainer(request, metadata=self.core.auth)
        return repeat(lambda: last(stream(), "created")).container_id

    def stop(self, container_id):
        """Sends TERM to the processes of a container, and KILL after 10 s. Their ends are reported as usual."""
        request = containers_pb2.StopContainerRequest(lease_token=self.token, container_id=container_id)
        self.core.call(self.containers.StopContainer, request)
    # docs:end

    # docs:settle
    def publish(self, container_id, **source):
        """Publishes `output` or `task_cache_id` after the end of the main process, and returns the candidate."""
        request = containers_pb2.PublishRequest(lease_token=self.token, container_id=container_id, **source)
        stream = lambda: self.containers.Publish(request, metadata=self.core.auth)
        return repeat(lambda: last(stream(), "published"))

    def settle(self, artifacts, build_id="", succeeded=True):
        """Ends the lease. The named candidates become artifacts, and everything else is deleted."""
        status = workloads_pb2.OUTCOME_SUCCEEDED if succeeded else workloads_pb2.OUTCOME_FAILED
        settlement = placements_pb2.Settlement(artifacts=artifacts, build_id=build_id, status=status)
        request = placements_pb2.ReleaseRequest(lease_token=self.token, settlement=settlement)
        missing = self.core.call(self.core.placements.Release, request).missing
        self.settled = True
        if missing:
            raise RuntimeError(f"owners are missing: {missing}")
    # docs:end

    # docs:run
    def run(self, container_id, command, document=None, **options):
        """Runs the main process of a container, with a JSON document as its input."""
        stdin = b"" if document is None else json.dumps(document).encode()
        result = self.start(container_id, container_id, self.token, command, stdin, **options)
        if not result.succeeded:
            # A process also ends when its lease is lost. Then this call is rejected with LEASE_LOST.
            repeat(self.renew)
        if result.exited.reason:
            raise RuntimeError(f"the process has no exit: {result.exited}")
        return result
    # docs:end


# docs:service
@contextlib.contextmanager
def service(lease, command):
    """Runs a service in a container of its own until the end of the block. Its first output says that it is ready."""
    container_id = lease.create("service", lease.core.spec(network=workloads_pb2.NETWORK_PRIVATE))
    heard = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(lease.run, container_id, command, heard=lambda stdout: heard.set())
        running.add_done_callback(lambda future: heard.set())
        heard.wait()
        try:
            yield container_id
        finally:
            lease.stop(container_id)
        result = running.result()
    if not result.succeeded:
        raise RuntimeError(f"the service ended with {result.exited}, stderr {bytes(result.stderr)!r}")
# docs:end


def output_of(step, result):
    """Returns the standard output of a step that succeeded."""
    if not result.succeeded:
        raise StepFailed(step, result)
    return result.stdout


# docs:owner
def owned(candidate, label="", **owner):
    """Returns an artifact of a settlement: owned by `owner` only, or by the build if there is none."""
    return placements_pb2.SettledArtifact(
        artifact_id=candidate.artifact_id,
        digest=candidate.digest,
        label=label,
        owners=[workloads_pb2.OutputOwner(**owner)] if owner else [],
        for_owners_only=bool(owner),
    )
# docs:end


class Build:
    """One run of the pipeline. The build owns the artifacts of its steps until it ends."""

    # docs:build
    def __init__(self, core, job, number):
        self.core, self.job, self.number = core, job, number
        # Without a renewal, for example after a crash of the core, the build ends as aborted after its term.
        self.term = duration_pb2.Duration(seconds=60)
        self.request = artifacts_pb2.PutBuildRequest(
            build_id=str(uuid.uuid4()), team=TEAM, job=job, number=number, term=self.term
        )
        self.build_id = self.request.build_id

    @contextlib.contextmanager
    def started(self):
        """Renews the build until the end of the block, and ends it with the status of the block."""
        put, core = self.core.owners.PutBuild, self.core
        core.call(put, self.request)
        status = artifacts_pb2.BUILD_STATUS_ERRORED
        try:
            with renewed(self.term, lambda: put(self.request, metadata=core.auth)):
                yield self
            status = artifacts_pb2.BUILD_STATUS_SUCCEEDED
        except StepFailed:
            status = artifacts_pb2.BUILD_STATUS_FAILED
            raise
        finally:
            self.request.status = status
            core.call(put, self.request)
    # docs:end

    # docs:check
    def check(self, source, version):
        """Returns the versions of the resource from `version` on, oldest first."""
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact})
        with leased(self.core, placements_pb2.PLACEMENT_KIND_CHECK, spec) as lease:
            result = lease.run(lease.create(), ["sh", "/opt/resource/check"], {"source": source, "version": version})
        return json.loads(output_of("check", result))
    # docs:end

    # docs:get
    def get(self, source, version):
        """Returns the artifact of a version, and whether this build made it.

        Builds that need the same version at the same time get the same artifact, which a single one of them makes."""
        key = json.dumps(["counter", self.core.type_digest.hex(), source, version], sort_keys=True)
        claim_id = str(uuid.uuid4())
        request = caches_pb2.FindOrCreateResourceCacheRequest(
            team=TEAM,
            key_digest=hashlib.sha256(key.encode()).digest(),
            claim_id=claim_id,
            type="counter",
            version=json.dumps(version),
            # The build keeps the cache until it ends.
            user=caches_pb2.CacheUser(build_id=self.build_id),
        )
        while True:
            found = self.core.call(self.core.caches.FindOrCreateResourceCache, request)
            match found.WhichOneof("outcome"):
                case "ready":
                    return found.ready.artifact_id, False
                case "claimed":
                    break
                case "in_progress":
                    time.sleep(1)

        renewal = caches_pb2.RenewResourceCacheRequest(team=TEAM, claim_id=claim_id)
        renew = lambda: self.core.caches.RenewResourceCache(renewal, metadata=self.core.auth)
        with renewed(found.claimed.term, renew):
            artifact_id, result = self.fetch(claim_id, {"source": source, "version": version})
        assert json.loads(output_of("get", result))["version"] == version, "another version"
        return artifact_id, True

    def fetch(self, claim_id, document):
        """Makes the artifact of a version for a resource cache. Returns it, and the result of the step."""
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact}, outputs=["version"])
        with leased(self.core, placements_pb2.PLACEMENT_KIND_GET, spec) as lease:
            container_id = lease.create()
            result = lease.run(container_id, ["sh", "/opt/resource/in", "/workspace/version"], document)
            output_of("get", result)
            published = lease.publish(container_id, output="version")
            # The cache owns the artifact, so it outlives the build.
            lease.settle([owned(published, "version", resource_cache_claim_id=claim_id)])
        return published.artifact_id, result
    # docs:end

    # docs:task
    def task(self, name, command, inputs, outputs, cache_paths, serve=None, beside=None, break_after=None):
        """Runs a command beside the service `serve`, and returns its result and the artifacts of its outputs.

        Outputs and caches of a command that fails are kept, too."""
        caches = self.task_caches(name, cache_paths)
        network = workloads_pb2.NETWORK_PRIVATE if serve else workloads_pb2.NETWORK_NONE
        spec = self.core.spec(inputs, outputs, caches, network)
        capabilities = ["exec", "network-container"] if serve else ["exec"]
        with leased(self.core, placements_pb2.PLACEMENT_KIND_TASK, spec, capabilities) as lease:
            with service(lease, serve) if serve else contextlib.nullcontext("") as service_id:
                # The container joins the network of the service, and reaches it at localhost.
                spec.network_container_id = service_id
                container_id = lease.create()
                heard = beside and (lambda stdout: beside(lease, container_id, stdout))
                result = lease.run(container_id, command, heard=heard, break_after=break_after)
            published = {output: lease.publish(container_id, output=output) for output in outputs}
            artifacts = [owned(candidate, output) for output, candidate in published.items()]
            for cache_id in caches.values():
                candidate = lease.publish(container_id, task_cache_id=cache_id)
                # An unchanged cache has no candidate.
                if candidate.artifact_id:
                    artifacts.append(owned(candidate, task_cache_id=cache_id))
            lease.settle(artifacts, self.build_id, result.succeeded)
        output_of(name, result)
        return result, {output: candidate.artifact_id for output, candidate in published.items()}
    # docs:end

    def task_caches(self, name, paths):
        """Returns the ids of the caches of a task by their paths."""
        caches = {}
        for path in paths:
            request = caches_pb2.FindOrCreateTaskCacheRequest(team=TEAM, job=self.job, step=name, path=path)
            caches[path] = self.core.call(self.core.caches.FindOrCreateTaskCache, request).cache_id
        return caches

    # docs:put
    def put(self, source, inputs):
        """Puts the inputs, which are directories below the working directory, and returns the new version."""
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact, **inputs})
        with leased(self.core, placements_pb2.PLACEMENT_KIND_PUT, spec) as lease:
            result = lease.run(lease.create(), ["sh", "/opt/resource/out", "/workspace"], {"source": source})
        return json.loads(output_of("put", result))["version"]
    # docs:end


class SubmittedBuild(Build):
    """A build whose steps are workloads. The scheduler chooses the worker, and the gateway performs each step."""

    # docs:workload
    def run(self, kind, spec, command, document=None, owner=None, services=(), beside=None, break_after=None):
        """Runs a workload, and returns the result of its process and its end."""
        workload_id = str(uuid.uuid4())
        inline = document is not None
        workload = workloads_pb2.WorkloadSpec(
            team=TEAM,
            kind=kind,
            image=spec.image,
            command=[word.encode() for word in command],
            stdin=workloads_pb2.STDIN_MODE_INLINE if inline else workloads_pb2.STDIN_MODE_NONE,
            inline_stdin=json.dumps(document).encode() if inline else b"",
            # The process does not wait for this caller. Its standard output is a part of its end.
            output=workloads_pb2.OUTPUT_MODE_SPOOLED,
            keep_result=True,
            inputs=spec.inputs,
            outputs=[
                workloads_pb2.Output(name=output.name, owners=[owner] if owner else []) for output in spec.outputs
            ],
            # A cache that the process changes gets a new version.
            caches=spec.caches,
            privilege=spec.privilege,
            network=spec.network,
            services=services,
            tags=self.core.tags,
            capabilities=["exec"],
            # The build owns outputs that have no other owner.
            build_id="" if owner else self.build_id,
        )
        self.core.call(self.core.workloads.Submit, workloads_pb2.SubmitRequest(workload_id=workload_id, spec=workload))
        event = self.wait(workload_id, ("running", "finished"))
        if isinstance(event, workloads_pb2.Finished) and event.failure.reason:
            raise RuntimeError(f"the workload did not run: {event.failure}")
        worker = Worker(self.core, event.location.worker_id, event.location.gateway_endpoint)
        with worker.gateway:
            attempt_id = event.location.attempt_id
            address = worker.address(attempt_id)
            resume = containers_pb2.AttachRequest(resume=containers_pb2.Resume(**address))
            attempt = SubmittedAttempt(self, workload_id, worker)
            heard = beside and (lambda stdout: beside(attempt, attempt_id, stdout))
            result = worker.drive(address, resume, break_after=break_after, heard=heard)
        finished = self.wait(workload_id, ("finished",))
        if finished.outcome == workloads_pb2.OUTCOME_ERRORED:
            raise RuntimeError(f"the workload failed: {finished.failure}")
        assert finished.exit.code == result.exited.code, (finished.exit, result.exited)
        # A workload that was cancelled has no result.
        if finished.HasField("result"):
            assert finished.result == result.stdout, "another result than the output"
        return result, finished

    def wait(self, workload_id, wanted):
        """Returns the first event of a workload with a wanted name. All events are received again after a break."""
        request = workloads_pb2.WatchRequest(team=TEAM, workload_id=workload_id)

        def watch():
            for event in self.core.workloads.Watch(request, metadata=self.core.auth):
                if event.WhichOneof("event") in wanted:
                    return getattr(event, event.WhichOneof("event"))
            raise RuntimeError("the stream ended without an event")

        return repeat(watch)
    # docs:end

    def check(self, source, version):
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact})
        command, document = ["sh", "/opt/resource/check"], {"source": source, "version": version}
        result, _ = self.run(workloads_pb2.WORKLOAD_KIND_CHECK, spec, command, document)
        return json.loads(output_of("check", result))

    # docs:submitted
    def fetch(self, claim_id, document):
        """Makes the artifact of a version for a resource cache. Returns it, and the result of the step."""
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact}, outputs=["version"])
        owner = workloads_pb2.OutputOwner(resource_cache_claim_id=claim_id)
        command = ["sh", "/opt/resource/in", "/workspace/version"]
        result, finished = self.run(workloads_pb2.WORKLOAD_KIND_GET, spec, command, document, owner)
        output_of("get", result)
        return finished.outputs[0].artifact_id, result
    # docs:end

    # docs:services
    def task(self, name, command, inputs, outputs, cache_paths, serve=None, beside=None, break_after=None):
        network = workloads_pb2.NETWORK_PRIVATE if serve else workloads_pb2.NETWORK_NONE
        spec = self.core.spec(inputs, outputs, self.task_caches(name, cache_paths), network)
        options = {"beside": beside, "break_after": break_after}
        if serve:
            ready = workloads_pb2.Readiness(tcp_port=SERVICE_PORT)
            words = [word.encode() for word in serve]
            options["services"] = [
                workloads_pb2.Service(name="counter", image=spec.image, command=words, readiness=ready)
            ]
        result, finished = self.run(workloads_pb2.WORKLOAD_KIND_TASK, spec, command, **options)
        assert not finished.notes, finished.notes
        output_of(name, result)
        return result, {output.name: output.artifact_id for output in finished.outputs}
    # docs:end

    def put(self, source, inputs):
        spec = self.core.spec(inputs={"/opt/resource": self.core.type_artifact, **inputs})
        command = ["sh", "/opt/resource/out", "/workspace"]
        result, _ = self.run(workloads_pb2.WORKLOAD_KIND_PUT, spec, command, {"source": source})
        return json.loads(output_of("put", result))["version"]


@dataclasses.dataclass
class SubmittedAttempt:
    """What a user of a running workload can do."""

    build: SubmittedBuild
    workload_id: str
    worker: Worker

    def exec(self, container_id, command, stdin):
        return self.worker.exec(container_id, command, stdin)

    def stop(self, container_id):
        request = workloads_pb2.CancelRequest(team=TEAM, workload_id=self.workload_id)
        self.build.core.call(self.build.core.workloads.Cancel, request)


# The process beside the task reads more than one window of input.
BESIDE_INPUT = b"input %07d\n" * (3 << 16)


def lines_of(version):
    return b"".join(b"line %06d of version %d\n" % (line, version) for line in range(1, 40_001))


@dataclasses.dataclass
class Made:
    """What the pipeline of a build made."""

    # Artifact of the version, and whether this build made it.
    version: str
    is_new: bool
    # Artifact of the task.
    result: str
    # Number of runs of the task, from its cache.
    runs: int
    # Bytes and codes, which do not depend on the way in which the steps run.
    observed: dict


def pipeline(build, source):
    """Runs the steps of one build."""
    beside = []

    def hijack(lease, container_id, stdout):
        if stdout.startswith(b"ready\n") and not beside:
            beside.append(lease.exec(container_id, ["sh", "-c", script("beside")], BESIDE_INPUT))

    core = build.core
    versions = build.check(source, {"number": "2"})
    assert versions == [{"number": "2"}, {"number": "3"}], versions
    version_artifact, is_new = build.get(source, versions[-1])
    print(f"build {build.number}: {'made' if is_new else 'found'} version 3: {version_artifact}")

    serve = ["perl", "-e", script("service")] if core.has_services else None
    command, inputs = ["sh", "-c", script("task"), "task"], {"version": version_artifact}
    if serve:
        command.append(str(SERVICE_PORT))
    result, outputs = build.task(
        "unit", command, inputs, ["result"], ["/cache"], serve=serve, beside=hijack, break_after=BREAK_AFTER
    )
    assert result.stdout == b"ready\n" + lines_of(3) and result.stderr == b"done\n", "each byte once, in order"
    assert result.connections > 1, "the call was not broken"
    [hijacked] = beside
    assert hijacked.exited.code == 3, hijacked.exited
    assert hijacked.stdout.split() == [hashlib.sha256(BESIDE_INPUT).hexdigest().encode(), b"-"], hijacked.stdout
    files, _ = repeat(lambda: core.download(outputs["result"]))
    assert files["lines"] == lines_of(3), "other bytes than the task wrote"
    assert files.get("served") == (b"served\n" if serve else None), "another line than that of the service"

    put = build.put(source, {"result": outputs["result"]})
    assert put == {"sha256": hashlib.sha256(lines_of(3)).hexdigest()}, put
    runs = int(files["runs"])
    print(f"build {build.number}: task ran for the {runs}. time, result {outputs['result']}")
    observed = {
        "versions": versions,
        "version": digest_of(core, version_artifact),
        "result": digest_of(core, outputs["result"]),
        "task": (result.exited.code, bytes(result.stdout), bytes(result.stderr)),
        "hijack": (hijacked.exited.code, bytes(hijacked.stdout)),
        "put": put,
    }
    return Made(version_artifact, is_new, outputs["result"], runs, observed)


def digest_of(core, artifact_id):
    request = artifacts_pb2.GetArtifactRequest(team=TEAM, artifact_id=artifact_id)
    return core.call(core.artifacts.GetArtifact, request).artifact.digest


def stop_task(build):
    """Runs a task that never ends, and stops it."""
    stop = lambda lease, container_id, stdout: lease.stop(container_id)
    build.task("endless", ["sh", "-c", script("endless")], {}, [], [], beside=stop)


def failure(build, step):
    """Runs a build whose step fails, and returns the result of the step."""
    try:
        with build.started():
            step(build)
    except StepFailed as error:
        return error.result
    raise RuntimeError("the step did not fail")


def kept_by(core, artifact_id):
    """Returns the kinds of objects that keep an artifact. They are none if the artifact is deleted."""
    try:
        request = artifacts_pb2.GetArtifactRequest(team=TEAM, artifact_id=artifact_id)
        keepers = core.call(core.artifacts.GetArtifact, request).artifact.kept_by
    except grpc.RpcError as error:
        if error_info(error).reason != "ARTIFACT_NOT_FOUND":
            raise
        return set()
    return {kind for kind in ("build", "pinned", "resource cache") for keeper in keepers if keeper.startswith(kind)}


def scenario(core, start_build):
    """Runs five builds. Returns what they observed: by the runs of the task, and of the builds that fail."""
    # Each run of this program has a job and a resource of its own.
    job, source = f"ci-core-{uuid.uuid4()}", {"newest": 3, "run": str(uuid.uuid4())}

    def run(number):
        build = start_build(core, job, number)
        with build.started():
            return pipeline(build, source)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = pool.map(run, [1, 2])
    assert first.version == second.version, "both builds use one artifact"
    assert first.is_new != second.is_new, "one build made it"
    third = run(3)
    assert (third.version, third.is_new) == (first.version, False), "the third build finds the version in its cache"
    assert third.runs == 1 + max(first.runs, second.runs), "the third build finds the task cache"

    missing = failure(start_build(core, job, 4), lambda build: build.check({"run": source["run"]}, None))
    assert missing.exited.code == 4 and missing.stderr == b"source.newest is missing\n", missing
    stopped = failure(start_build(core, job, 5), stop_task)
    assert stopped.exited.code == 7 and stopped.stdout == b"ready\nstopped\n", stopped

    # The builds have let go of their results, which are deleted with the last container that used them. The version
    # stays for later builds.
    for made in (first, second, third):
        assert not {"build", "pinned"} & kept_by(core, made.result), kept_by(core, made.result)
    assert "resource cache" in kept_by(core, first.version), kept_by(core, first.version)
    failures = [(end.exited.code, bytes(end.stdout), bytes(end.stderr)) for end in (missing, stopped)]
    return {made.runs: made.observed for made in (first, second, third)}, failures


def main():
    core = Core()
    if not core.has_services:
        print("the task has no service: its worker cannot join networks")
    driven, driven_failures = scenario(core, Build)
    submitted, submitted_failures = scenario(core, SubmittedBuild)
    assert driven_failures == submitted_failures, "other ends of the failed builds"
    # How often two builds at a time find the task cache may differ.
    for runs in driven.keys() & submitted.keys():
        for what in driven[runs]:
            assert driven[runs][what] == submitted[runs][what], f"another {what} of a workload"
    print("ci core: 5 builds, ok")


if __name__ == "__main__":
    main()
