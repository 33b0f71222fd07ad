package gantry.example;

import com.google.gson.Gson;
import com.google.protobuf.ByteString;
import com.google.rpc.ErrorInfo;
import gantry.artifacts.v1.OwnersGrpc;
import gantry.artifacts.v1.PutBuildRequest;
import gantry.runtime.v1.Ack;
import gantry.runtime.v1.AttachRequest;
import gantry.runtime.v1.AttachResponse;
import gantry.runtime.v1.ContainersGrpc;
import gantry.runtime.v1.ReadArchiveRequest;
import gantry.runtime.v1.Resume;
import gantry.runtime.v1.Stream;
import gantry.runtime.v1.VolumesGrpc;
import gantry.runtime.v1.WriteArchiveRequest;
import gantry.runtime.v1.WriteCommit;
import gantry.runtime.v1.WriteOpen;
import gantry.scheduler.v1.Access;
import gantry.scheduler.v1.ExplainRequest;
import gantry.scheduler.v1.HostImage;
import gantry.scheduler.v1.Image;
import gantry.scheduler.v1.Input;
import gantry.scheduler.v1.Network;
import gantry.scheduler.v1.Outcome;
import gantry.scheduler.v1.Output;
import gantry.scheduler.v1.OutputMode;
import gantry.scheduler.v1.PlacementsGrpc;
import gantry.scheduler.v1.Privilege;
import gantry.scheduler.v1.StdinMode;
import gantry.scheduler.v1.SubmitRequest;
import gantry.scheduler.v1.Verdict;
import gantry.scheduler.v1.WatchRequest;
import gantry.scheduler.v1.WatchResponse;
import gantry.scheduler.v1.WatchResponse.EventCase;
import gantry.scheduler.v1.AttemptLocation;
import gantry.scheduler.v1.WorkloadKind;
import gantry.scheduler.v1.WorkloadSpec;
import gantry.scheduler.v1.WorkloadsGrpc;
import gantry.streamer.v1.DownloadRequest;
import gantry.streamer.v1.StreamerGrpc;
import gantry.streamer.v1.UploadCommit;
import gantry.streamer.v1.UploadOpen;
import gantry.streamer.v1.UploadRequest;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.BlockingClientCall;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.grpc.stub.MetadataUtils;
import java.io.BufferedOutputStream;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InterruptedIOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.commons.compress.archivers.tar.TarArchiveEntry;
import org.apache.commons.compress.archivers.tar.TarArchiveInputStream;
import org.apache.commons.compress.archivers.tar.TarArchiveOutputStream;
import org.apache.commons.compress.archivers.tar.TarConstants;

/** Uploads a directory, runs a command that copies it and writes output, follows the command, and downloads the copy. docs/clients.md explains each step. */
public final class Client implements AutoCloseable {
  private static final int BREAK_AFTER = 100_000;
  /** More output than a worker keeps without acknowledgement. A caller that does not acknowledge standard error waits forever. */
  private static final int ERRORS = 40 << 20;

  private final String team = System.getenv().getOrDefault("GANTRY_TEAM", "main");
  private final Map<String, String> addresses = addresses();
  private final List<ManagedChannel> channels = new ArrayList<>();
  private final WorkloadsGrpc.WorkloadsBlockingV2Stub workloads;
  private final PlacementsGrpc.PlacementsBlockingV2Stub placements;
  private final OwnersGrpc.OwnersBlockingV2Stub owners;
  private final StreamerGrpc.StreamerBlockingV2Stub streamer;

  Client() throws IOException {
    ManagedChannel scheduler = connect(addresses.get("scheduler"));
    workloads = WorkloadsGrpc.newBlockingV2Stub(scheduler);
    placements = PlacementsGrpc.newBlockingV2Stub(scheduler);
    owners = OwnersGrpc.newBlockingV2Stub(connect(addresses.get("artifacts")));
    streamer = StreamerGrpc.newBlockingV2Stub(connect(addresses.get("streamer")));
  }

  // docs:connect
  /** GANTRY_SERVER: one address for all services, or `scheduler=…,artifacts=…,streamer=…,proxy=…`. */
  private static Map<String, String> addresses() {
    String server = System.getenv("GANTRY_SERVER");
    if (!server.contains("=")) {
      return Map.of("scheduler", server, "artifacts", server, "streamer", server, "proxy", server);
    }
    return Arrays.stream(server.split(",")).map(part -> part.split("=", 2)).collect(Collectors.toMap(part -> part[0], part -> part[1]));
  }

  private ManagedChannel connect(String address) throws IOException {
    var headers = new Metadata();
    String tokenFile = System.getenv("GANTRY_TOKEN_FILE");
    if (tokenFile != null) {
      var authorization = Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER);
      headers.put(authorization, "Bearer " + Files.readString(Path.of(tokenFile)).strip());
    }
    @SuppressWarnings("unchecked")
    Map<String, ?> retries = new Gson().fromJson(Files.readString(Path.of("../../../proto/service-config.json")), Map.class);
    ManagedChannel channel = Grpc.newChannelBuilder(address.replaceFirst("^http://", ""), InsecureChannelCredentials.create())
        .defaultServiceConfig(retries)
        .intercept(MetadataUtils.newAttachHeadersInterceptor(headers))
        .build();
    channels.add(channel);
    return channel;
  }
  // docs:end

  /** Connects to the gateway of a worker, or to the proxy if there is one. */
  private ManagedChannel gateway(String endpoint) throws IOException {
    return connect(addresses.getOrDefault("proxy", endpoint));
  }

  // docs:upload
  record Uploaded(String artifactId, ByteString digest) {}

  Uploaded upload(Path directory, String buildId) throws Exception {
    var call = streamer.upload();
    call.write(UploadRequest.newBuilder()
        .setOpen(UploadOpen.newBuilder().setTeam(team).setArtifactId(UUID.randomUUID().toString()).setBuildId(buildId).setLabel("src"))
        .build());
    var endpoint = call.read().getEndpoint();

    var volumes = VolumesGrpc.newBlockingV2Stub(gateway(endpoint.getGatewayEndpoint()));
    var archive = volumes.writeArchive();
    archive.write(WriteArchiveRequest.newBuilder().setOpen(WriteOpen.newBuilder().setTicket(endpoint.getTicket())).build());
    try (var tar = new TarArchiveOutputStream(new BufferedOutputStream(chunks(archive), 256 * 1024))) {
      pack(directory, tar);
    }
    archive.write(WriteArchiveRequest.newBuilder().setCommit(WriteCommit.getDefaultInstance()).build());
    archive.halfClose();
    ByteString digest = archive.read().getDigest();

    // Without the commit, the upload has no effect.
    call.write(UploadRequest.newBuilder().setCommit(UploadCommit.newBuilder().setDigest(digest)).build());
    var uploaded = call.read().getUploaded();
    call.halfClose();
    return new Uploaded(uploaded.getArtifactId(), digest);
  }
  // docs:end

  private static OutputStream chunks(BlockingClientCall<WriteArchiveRequest, ?> archive) {
    return new OutputStream() {
      @Override
      public void write(int octet) throws IOException {
        write(new byte[] {(byte) octet}, 0, 1);
      }

      @Override
      public void write(byte[] data, int offset, int length) throws IOException {
        try {
          archive.write(WriteArchiveRequest.newBuilder().setData(ByteString.copyFrom(data, offset, length)).build());
        } catch (StatusException error) {
          throw new IOException(error);
        } catch (InterruptedException error) {
          throw new InterruptedIOException();
        }
      }
    };
  }

  private static void pack(Path directory, TarArchiveOutputStream tar) throws IOException {
    tar.setLongFileMode(TarArchiveOutputStream.LONGFILE_POSIX);
    for (Path path : list(directory)) {
      String name = directory.relativize(path).toString();
      if (Files.isSymbolicLink(path)) {
        var link = new TarArchiveEntry(name, TarConstants.LF_SYMLINK);
        link.setLinkName(Files.readSymbolicLink(path).toString());
        tar.putArchiveEntry(link);
      } else {
        var entry = new TarArchiveEntry(path, name);
        entry.setMode((int) Files.getAttribute(path, "unix:mode") & 07777);
        tar.putArchiveEntry(entry);
        if (Files.isRegularFile(path)) {
          Files.copy(path, tar);
        }
      }
      tar.closeArchiveEntry();
    }
  }

  /** Returns files with their contents, and symbolic links as `-> target`. */
  private static Map<String, ByteString> readAll(Path directory) throws IOException {
    var files = new TreeMap<String, ByteString>();
    for (Path path : list(directory)) {
      String name = directory.relativize(path).toString();
      if (Files.isSymbolicLink(path)) {
        files.put(name, ByteString.copyFromUtf8("-> " + Files.readSymbolicLink(path)));
      } else if (Files.isRegularFile(path)) {
        files.put(name, ByteString.copyFrom(Files.readAllBytes(path)));
      }
    }
    return files;
  }

  private static List<Path> list(Path directory) throws IOException {
    try (var paths = Files.walk(directory)) {
      return paths.filter(path -> !path.equals(directory)).sorted().toList();
    }
  }

  // docs:submit
  WorkloadSpec.Builder spec(String artifactId, String buildId) {
    String script = "cp -a src/. out && head -c 40M /dev/zero >&2 && seq -f 'line %06.0f' 0 39999";
    return WorkloadSpec.newBuilder()
        .setTeam(team)
        .setKind(WorkloadKind.WORKLOAD_KIND_TASK)
        .setImage(Image.newBuilder().setHost(HostImage.getDefaultInstance()))
        .addAllCommand(java.util.stream.Stream.of("sh", "-c", script).map(ByteString::copyFromUtf8).toList())
        .setStdin(StdinMode.STDIN_MODE_NONE)
        .setOutput(OutputMode.OUTPUT_MODE_ATTACHED)
        .addInputs(Input.newBuilder().setName("src").setArtifactId(artifactId).setAccess(Access.ACCESS_READ_ONLY))
        .addOutputs(Output.newBuilder().setName("out"))
        .setPrivilege(Privilege.PRIVILEGE_CONFINED)
        .setNetwork(Network.NETWORK_NONE)
        .setBuildId(buildId);
  }

  void submit(String workloadId, WorkloadSpec spec) throws StatusException {
    workloads.submit(SubmitRequest.newBuilder().setWorkloadId(workloadId).setSpec(spec).build());
  }
  // docs:end

  // docs:watch
  /** Follows a workload until a wanted event. Returns the revision from which the next call resumes. */
  WatchResponse watch(String workloadId, EventCase wanted, long afterRevision) throws Exception {
    var request = WatchRequest.newBuilder().setTeam(team).setWorkloadId(workloadId).setAfterRevision(afterRevision).build();
    var call = workloads.watch(request);
    try {
      for (WatchResponse event = call.read(); event != null; event = call.read()) {
        System.out.println("watched: " + event.getEventCase().name().toLowerCase());
        if (event.getEventCase() == wanted) {
          return event;
        }
        check(!event.hasFinished(), "ended early: " + event);
      }
      throw new IOException("the stream was cut");
    } finally {
      call.cancel("enough was seen", null);
    }
  }
  // docs:end

  // docs:attach
  record Attached(byte[] stdout, byte[] stderr, int connections) {}

  /** Returns both outputs completely. Its connection breaks once. */
  Attached attach(AttemptLocation location) throws Exception {
    var stdout = new ByteArrayOutputStream();
    var stderr = new ByteArrayOutputStream();
    for (int connections = 1; ; connections++) {
      ManagedChannel channel = gateway(location.getGatewayEndpoint());
      var reader = new Reader(stdout, stderr, connections == 1 ? BREAK_AFTER : Integer.MAX_VALUE);
      var requests = ContainersGrpc.newStub(channel).attach(reader);
      var resume = Resume.newBuilder().setTeam(team).setWorkerId(location.getWorkerId())
          .setProcessId(location.getAttemptId()).setStdoutOffset(stdout.size()).setStderrOffset(stderr.size());
      requests.onNext(AttachRequest.newBuilder().setResume(resume).build());
      boolean done = reader.done.get();
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS); // Breaks the connection.
      if (done) {
        return new Attached(stdout.toByteArray(), stderr.toByteArray(), connections);
      }
    }
  }

  /** Never blocks to send. A blocking stub that waits to send while responses are unread may wait forever. */
  private static final class Reader implements ClientResponseObserver<AttachRequest, AttachResponse> {
    final CompletableFuture<Boolean> done = new CompletableFuture<>();
    private final ByteArrayOutputStream stdout;
    private final ByteArrayOutputStream stderr;
    private final int breakAfter;
    private ClientCallStreamObserver<AttachRequest> requests;

    Reader(ByteArrayOutputStream stdout, ByteArrayOutputStream stderr, int breakAfter) {
      this.stdout = stdout;
      this.stderr = stderr;
      this.breakAfter = breakAfter;
    }

    @Override
    public void beforeStart(ClientCallStreamObserver<AttachRequest> requests) {
      this.requests = requests;
    }

    @Override
    public void onNext(AttachResponse said) {
      if (done.isDone()) {
        return;
      }
      if (said.hasOutput()) {
        var output = said.getOutput().getStream() == Stream.STREAM_STDOUT ? stdout : stderr;
        check(said.getOutput().getOffset() == output.size(), "out of order");
        output.writeBytes(said.getOutput().getData().toByteArray());
        // Acknowledge both outputs, even if one is discarded. The worker then drops the bytes, and the process continues.
        var ack = Ack.newBuilder().setStdoutOffset(stdout.size()).setStderrOffset(stderr.size());
        requests.onNext(AttachRequest.newBuilder().setAck(ack).build());
      }
      if (said.hasDone()) {
        requests.onCompleted();
        done.complete(true);
      } else if (stdout.size() >= breakAfter) {
        done.complete(false);
      }
    }

    @Override
    public void onError(Throwable error) {
      done.completeExceptionally(error);
    }

    @Override
    public void onCompleted() {
      done.completeExceptionally(new IOException("the stream was cut"));
    }
  }
  // docs:end

  // docs:download
  record Downloaded(Map<String, ByteString> files, ByteString digest) {}

  Downloaded download(String artifactId) throws Exception {
    var found = streamer.download(DownloadRequest.newBuilder().setTeam(team).setArtifactId(artifactId).build());
    var content = new ByteArrayOutputStream();
    ByteString digest = null;
    var volumes = VolumesGrpc.newBlockingV2Stub(gateway(found.getEndpoint().getGatewayEndpoint()));
    var call = volumes.readArchive(ReadArchiveRequest.newBuilder().setTicket(found.getEndpoint().getTicket()).build());
    for (var part = call.read(); part != null; part = call.read()) {
      part.getData().writeTo(content);
      if (part.hasDone()) {
        digest = part.getDone().getDigest();
      }
    }
    check(found.getDigest().equals(digest), "the stream was cut");
    var files = new TreeMap<String, ByteString>();
    try (var tar = new TarArchiveInputStream(new ByteArrayInputStream(content.toByteArray()))) {
      for (var entry = tar.getNextEntry(); entry != null; entry = tar.getNextEntry()) {
        String name = entry.getName().replaceFirst("^\\./", "");
        if (entry.isSymbolicLink()) {
          files.put(name, ByteString.copyFromUtf8("-> " + entry.getLinkName()));
        } else if (entry.isFile()) {
          files.put(name, ByteString.readFrom(tar));
        }
      }
    }
    return new Downloaded(files, digest);
  }
  // docs:end

  // docs:refused
  /** Returns the reason of an error, as listed in docs/errors.md. */
  static ErrorInfo errorInfo(StatusException error) throws Exception {
    for (var detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        return detail.unpack(ErrorInfo.class);
      }
    }
    throw error; // The error does not come from Gantry.
  }
  // docs:end

  private void run(Path directory) throws Exception {
    String workloadId = UUID.randomUUID().toString();
    String buildId = UUID.randomUUID().toString();
    owners.putBuild(PutBuildRequest.newBuilder().setBuildId(buildId).setTeam(team).setEndsWithWorkloadId(workloadId).build());

    Uploaded uploaded = upload(directory, buildId);
    System.out.printf("uploaded: %s, digest %s%n", uploaded.artifactId(), hex(uploaded.digest()));

    submit(workloadId, spec(uploaded.artifactId(), buildId).build());
    System.out.printf("submitted: %s%n", workloadId);

    WatchResponse running = watch(workloadId, EventCase.RUNNING, 0);
    Attached attached = attach(running.getRunning().getLocation());
    String expected = IntStream.range(0, 40_000).mapToObj("line %06d\n"::formatted).collect(Collectors.joining());
    check(Arrays.equals(attached.stdout(), expected.getBytes(StandardCharsets.UTF_8)), "not each byte once, in order");
    check(Arrays.equals(attached.stderr(), new byte[ERRORS]), "not each byte of standard error once");
    check(attached.connections() > 1, "the connection was not broken");
    byte[] sha256 = MessageDigest.getInstance("SHA-256").digest(attached.stdout());
    System.out.printf("attached: %d and %d bytes over %d connections, sha256 %s%n",
        attached.stdout().length, attached.stderr().length, attached.connections(), HexFormat.of().formatHex(sha256));

    var finished = watch(workloadId, EventCase.FINISHED, running.getRevision()).getFinished();
    check(finished.getOutcome() == Outcome.OUTCOME_SUCCEEDED, finished.toString());

    var copy = finished.getOutputs(0);
    Downloaded downloaded = download(copy.getArtifactId());
    check(downloaded.digest().equals(copy.getDigest()), "the output has another digest than was said");
    check(downloaded.files().equals(readAll(directory)), "the copy differs from the original");
    System.out.printf("downloaded: %d files, digest %s%n", downloaded.files().size(), hex(copy.getDigest()));

    // docs:explain
    WorkloadSpec impossible = spec(uploaded.artifactId(), buildId).addTags("no-such-worker").build();
    try {
      submit(UUID.randomUUID().toString(), impossible);
      throw new IllegalStateException("not refused");
    } catch (StatusException error) {
      ErrorInfo info = errorInfo(error);
      check(error.getStatus().getCode() == Status.Code.FAILED_PRECONDITION, info.toString());
      check(info.getReason().equals("NO_COMPATIBLE_WORKER"), info.toString());
      System.out.printf("refused: %s of %s, %s%n", info.getReason(), info.getDomain(), info.getMetadataMap());
    }

    var explained = placements.explain(ExplainRequest.newBuilder().setSpec(impossible).build());
    check(explained.getVerdict() == Verdict.VERDICT_NEVER, explained.toString());
    System.out.printf("explained: never, unless %s%n", String.join(" or ", explained.getUnblockedByList()));
    // docs:end
  }

  private static String hex(ByteString bytes) {
    return HexFormat.of().formatHex(bytes.toByteArray());
  }

  private static void check(boolean holds, String otherwise) {
    if (!holds) {
      throw new IllegalStateException(otherwise);
    }
  }

  @Override
  public void close() throws InterruptedException {
    for (ManagedChannel channel : channels) {
      channel.shutdownNow().awaitTermination(5, TimeUnit.SECONDS);
    }
  }

  public static void main(String[] arguments) throws Exception {
    try (var client = new Client()) {
      client.run(Path.of(arguments[0]));
    }
  }
}
