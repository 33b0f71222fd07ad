"""Uploads a directory, runs a command that copies it and writes output, follows the command, and downloads the copy. docs/clients.md explains each step."""

import hashlib
import io
import os
import pathlib
import queue
import sys
import tarfile
import tempfile
import uuid

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "gen"))

from gantry.artifacts.v1 import artifacts_pb2, artifacts_pb2_grpc
from gantry.runtime.v1 import containers_pb2, containers_pb2_grpc, volumes_pb2, volumes_pb2_grpc
from gantry.scheduler.v1 import placements_pb2, placements_pb2_grpc, workloads_pb2, workloads_pb2_grpc
from gantry.streamer.v1 import streamer_pb2, streamer_pb2_grpc

TEAM = os.environ.get("GANTRY_TEAM", "main")
EXPECTED = b"".join(b"line %06d\n" % number for number in range(40_000))
# More output than a worker keeps without acknowledgement. A caller that does not acknowledge standard error waits forever.
ERRORS = 40 << 20
BREAK_AFTER = 100_000


# docs:connect
def addresses():
    """GANTRY_SERVER: one address for all services, or `scheduler=…,artifacts=…,streamer=…,proxy=…`."""
    server = os.environ["GANTRY_SERVER"]
    if "=" in server:
        return dict(part.split("=", 1) for part in server.split(","))
    return dict.fromkeys(["scheduler", "artifacts", "streamer", "proxy"], server)


def connect(address):
    options = [("grpc.service_config", (HERE / "../../../proto/service-config.json").read_text())]
    return grpc.insecure_channel(address.removeprefix("http://"), options)


def credentials():
    """The metadata that every call carries."""
    token_file = os.environ.get("GANTRY_TOKEN_FILE")
    return [("authorization", "Bearer " + pathlib.Path(token_file).read_text().strip())] if token_file else []
# docs:end


class Client:
    def __init__(self):
        self.auth = credentials()
        self.addresses = addresses()
        scheduler = connect(self.addresses["scheduler"])
        self.workloads = workloads_pb2_grpc.WorkloadsStub(scheduler)
        self.placements = placements_pb2_grpc.PlacementsStub(scheduler)
        self.owners = artifacts_pb2_grpc.OwnersStub(connect(self.addresses["artifacts"]))
        self.streamer = streamer_pb2_grpc.StreamerStub(connect(self.addresses["streamer"]))

    def gateway(self, endpoint):
        """Connects to the gateway of a worker, or to the proxy if there is one."""
        return connect(self.addresses.get("proxy", endpoint))

    # docs:upload
    def upload(self, directory, build_id):
        tar = pack(directory)
        requests = queue.SimpleQueue()
        answers = self.streamer.Upload(iter(requests.get, None), metadata=self.auth)
        opened = streamer_pb2.UploadOpen(team=TEAM, artifact_id=str(uuid.uuid4()), build_id=build_id, label="src")
        requests.put(streamer_pb2.UploadRequest(open=opened))
        endpoint = next(answers).endpoint

        with self.gateway(endpoint.gateway_endpoint) as channel:
            volumes = volumes_pb2_grpc.VolumesStub(channel)
            written = volumes.WriteArchive(archive(tar, endpoint.ticket), metadata=self.auth)

        # Without the commit, the upload has no effect.
        requests.put(streamer_pb2.UploadRequest(commit=streamer_pb2.UploadCommit(digest=written.digest)))
        uploaded = next(answers).uploaded
        requests.put(None)
        return uploaded.artifact_id, written.digest
    # docs:end

    # docs:submit
    def spec(self, artifact_id, build_id, tags=()):
        script = b"cp -a src/. out && head -c 40M /dev/zero >&2 && seq -f 'line %06.0f' 0 39999"
        return workloads_pb2.WorkloadSpec(
            team=TEAM,
            kind=workloads_pb2.WORKLOAD_KIND_TASK,
            image=workloads_pb2.Image(host=workloads_pb2.HostImage()),
            command=[b"sh", b"-c", script],
            stdin=workloads_pb2.STDIN_MODE_NONE,
            output=workloads_pb2.OUTPUT_MODE_ATTACHED,
            inputs=[workloads_pb2.Input(name="src", artifact_id=artifact_id, access=workloads_pb2.ACCESS_READ_ONLY)],
            outputs=[workloads_pb2.Output(name="out")],
            privilege=workloads_pb2.PRIVILEGE_CONFINED,
            network=workloads_pb2.NETWORK_NONE,
            tags=tags,
            build_id=build_id,
        )

    def submit(self, workload_id, spec):
        self.workloads.Submit(workloads_pb2.SubmitRequest(workload_id=workload_id, spec=spec), metadata=self.auth)
    # docs:end

    # docs:watch
    def watch(self, workload_id, wanted, after_revision=0):
        """Follows a workload until a wanted event. Returns the revision from which the next call resumes."""
        request = workloads_pb2.WatchRequest(team=TEAM, workload_id=workload_id, after_revision=after_revision)
        for event in self.workloads.Watch(request, metadata=self.auth):
            name = event.WhichOneof("event")
            print(f"watched: {name}")
            if name == wanted:
                return event.revision, getattr(event, name)
            if name == "finished":
                raise RuntimeError(f"ended early: {event.finished}")
        raise RuntimeError("the stream was cut")
    # docs:end

    # docs:attach
    def attach(self, location):
        """Returns both outputs completely. Its connection breaks once."""
        outputs = {containers_pb2.STREAM_STDOUT: bytearray(), containers_pb2.STREAM_STDERR: bytearray()}
        stdout, stderr = outputs.values()
        connections, done = 0, False
        while not done:
            connections += 1
            with self.gateway(location.gateway_endpoint) as channel:
                requests = queue.SimpleQueue()
                resume = containers_pb2.Resume(
                    team=TEAM,
                    worker_id=location.worker_id,
                    process_id=location.attempt_id,
                    stdout_offset=len(stdout),
                    stderr_offset=len(stderr),
                )
                requests.put(containers_pb2.AttachRequest(resume=resume))
                for said in containers_pb2_grpc.ContainersStub(channel).Attach(
                    iter(requests.get, None), metadata=self.auth
                ):
                    kind = said.WhichOneof("message")
                    if kind == "output":
                        output = outputs[said.output.stream]
                        assert said.output.offset == len(output), "out of order"
                        output += said.output.data
                        # Acknowledge both outputs, even if one is discarded. The worker then drops the bytes, and the process continues.
                        ack = containers_pb2.Ack(stdout_offset=len(stdout), stderr_offset=len(stderr))
                        requests.put(containers_pb2.AttachRequest(ack=ack))
                    done = kind == "done"
                    if done or (connections == 1 and len(stdout) >= BREAK_AFTER):
                        break  # Leaving the channel breaks its connection.
                requests.put(None)
        return stdout, stderr, connections
    # docs:end

    # docs:download
    def download(self, artifact_id):
        request = streamer_pb2.DownloadRequest(team=TEAM, artifact_id=artifact_id)
        found = self.streamer.Download(request, metadata=self.auth)
        content, digest = io.BytesIO(), None
        with self.gateway(found.endpoint.gateway_endpoint) as channel:
            request = volumes_pb2.ReadArchiveRequest(ticket=found.endpoint.ticket)
            for part in volumes_pb2_grpc.VolumesStub(channel).ReadArchive(request, metadata=self.auth):
                if part.WhichOneof("message") == "done":
                    digest = part.done.digest
                else:
                    content.write(part.data)
        assert digest == found.digest, "the stream was cut"
        content.seek(0)
        with tarfile.open(fileobj=content) as tar:
            files = {
                member.name.removeprefix("./"): member.linkname if member.issym() else tar.extractfile(member).read()
                for member in tar
                if member.isfile() or member.islnk() or member.issym()
            }
        return files, digest
    # docs:end


def pack(directory):
    """Packs a tar archive before the call starts, so that read errors do not surface in gRPC."""
    file = tempfile.TemporaryFile()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(directory, arcname=".")
    file.seek(0)
    return file


def archive(tar, ticket):
    """Yields the requests of WriteArchive."""
    yield volumes_pb2.WriteArchiveRequest(open=volumes_pb2.WriteOpen(ticket=ticket))
    while data := tar.read(256 * 1024):
        yield volumes_pb2.WriteArchiveRequest(data=data)
    yield volumes_pb2.WriteArchiveRequest(commit=volumes_pb2.WriteCommit())


def read_all(directory):
    """Returns files with their contents, and symbolic links with their targets."""
    paths = [path for path in pathlib.Path(directory).rglob("*") if path.is_symlink() or path.is_file()]
    return {
        str(path.relative_to(directory)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in paths
    }


# docs:refused
def error_info(error):
    """Returns the reason of an error, as listed in docs/errors.md."""
    info = error_details_pb2.ErrorInfo()
    for detail in rpc_status.from_call(error).details:
        if detail.Unpack(info):
            return info
    raise error  # The error does not come from Gantry.
# docs:end


def main(directory):
    client = Client()
    workload_id, build_id = str(uuid.uuid4()), str(uuid.uuid4())
    client.owners.PutBuild(
        artifacts_pb2.PutBuildRequest(build_id=build_id, team=TEAM, ends_with_workload_id=workload_id),
        metadata=client.auth,
    )

    artifact_id, digest = client.upload(directory, build_id)
    print(f"uploaded: {artifact_id}, digest {digest.hex()}")

    spec = client.spec(artifact_id, build_id)
    client.submit(workload_id, spec)
    print(f"submitted: {workload_id}")

    revision, running = client.watch(workload_id, "running")
    stdout, stderr, connections = client.attach(running.location)
    assert stdout == EXPECTED and stderr == bytes(ERRORS), "each byte once, in order"
    assert connections > 1, "the connection was not broken"
    sha256 = hashlib.sha256(stdout).hexdigest()
    print(f"attached: {len(stdout)} and {len(stderr)} bytes over {connections} connections, sha256 {sha256}")

    _, finished = client.watch(workload_id, "finished", revision)
    assert finished.outcome == workloads_pb2.OUTCOME_SUCCEEDED, finished

    files, copied = client.download(finished.outputs[0].artifact_id)
    assert copied == finished.outputs[0].digest, "the output has another digest than was said"
    assert files == read_all(directory), "the copy differs from the original"
    print(f"downloaded: {len(files)} files, digest {copied.hex()}")

    # docs:explain
    impossible = client.spec(artifact_id, build_id, tags=["no-such-worker"])
    try:
        client.submit(str(uuid.uuid4()), impossible)
        raise RuntimeError("not refused")
    except grpc.RpcError as error:
        info = error_info(error)
        assert (error.code(), info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NO_COMPATIBLE_WORKER")
        print(f"refused: {info.reason} of {info.domain}, {dict(info.metadata)}")

    explained = client.placements.Explain(placements_pb2.ExplainRequest(spec=impossible), metadata=client.auth)
    assert explained.verdict == placements_pb2.VERDICT_NEVER
    print(f"explained: never, unless {' or '.join(explained.unblocked_by)}")
    # docs:end


if __name__ == "__main__":
    main(sys.argv[1])
