// Uploads a directory, runs a command that copies it and writes output, follows the command, and downloads the copy. docs/clients.md explains each step.

import { deepStrictEqual, ok, strictEqual } from "node:assert";
import { createHash, randomUUID } from "node:crypto";
import { lstatSync, readdirSync, readFileSync, readlinkSync } from "node:fs";
import { join } from "node:path";
import { Readable } from "node:stream";
import { buffer } from "node:stream/consumers";
import { pathToFileURL } from "node:url";

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { createWritableIterable } from "@connectrpc/connect/protocol";
import tar from "tar-stream";

import { Owners } from "../gen/gantry/artifacts/v1/artifacts_pb.js";
import { AttachRequestSchema, Containers, Stream } from "../gen/gantry/runtime/v1/containers_pb.js";
import { Volumes, WriteArchiveRequestSchema } from "../gen/gantry/runtime/v1/volumes_pb.js";
import { Placements, Verdict } from "../gen/gantry/scheduler/v1/placements_pb.js";
import {
  Access,
  Network,
  Outcome,
  OutputMode,
  Privilege,
  StdinMode,
  type WatchResponse,
  type AttemptLocation,
  WorkloadKind,
  Workloads,
  WorkloadSpecSchema,
} from "../gen/gantry/scheduler/v1/workloads_pb.js";
import { Streamer, UploadRequestSchema } from "../gen/gantry/streamer/v1/streamer_pb.js";
import { ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { retry } from "./retry.js";

const team = process.env.GANTRY_TEAM ?? "main";
const breakAfter = 100_000;
// More output than a worker keeps without acknowledgement. A caller that does not acknowledge standard error waits forever.
const errors = 40 << 20;

// docs:connect
/** GANTRY_SERVER: one address for all services, or `scheduler=…,artifacts=…,streamer=…,proxy=…`. */
function addresses(): Map<string, string> {
  const server = process.env.GANTRY_SERVER ?? "";
  const parts = server.includes("=")
    ? server.split(",").map((part) => part.split("=", 2) as [string, string])
    : ["scheduler", "artifacts", "streamer", "proxy"].map((service): [string, string] => [service, server]);
  return new Map(parts);
}

/** Adds the cluster token to each call. */
function authorize(): Interceptor {
  const file = process.env.GANTRY_TOKEN_FILE;
  const token = file === undefined ? undefined : readFileSync(file, "utf8").trim();
  return (next) => (request) => {
    if (token !== undefined) request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}

const interceptors = [retry(), authorize()];

function connect(address: string | undefined) {
  if (address === undefined) throw new Error("GANTRY_SERVER does not name all services");
  const connection = new Http2SessionManager(address);
  return { connection, transport: createGrpcTransport({ baseUrl: address, interceptors, sessionManager: connection }) };
}
// docs:end

const servers = addresses();
const scheduler = connect(servers.get("scheduler"));
const artifacts = connect(servers.get("artifacts"));
const streaming = connect(servers.get("streamer"));
const workloads = createClient(Workloads, scheduler.transport);
const placements = createClient(Placements, scheduler.transport);
const owners = createClient(Owners, artifacts.transport);
const streamer = createClient(Streamer, streaming.transport);

/** Connects to the gateway of a worker, or to the proxy if there is one. */
function gateway(endpoint: string) {
  return connect(servers.get("proxy") ?? endpoint);
}

// docs:upload
async function upload(directory: string, buildId: string) {
  const requests = createWritableIterable<MessageInitShape<typeof UploadRequestSchema>>();
  const answers = streamer.upload(requests)[Symbol.asyncIterator]();
  const open = { team, artifactId: randomUUID(), buildId, label: "src" };
  void requests.write({ message: { case: "open", value: open } });
  const { value: first } = await answers.next();
  if (first?.message.case !== "endpoint") throw new Error("the stream was cut");

  const { gatewayEndpoint, ticket } = first.message.value;
  const { connection, transport } = gateway(gatewayEndpoint);
  const written = await createClient(Volumes, transport).writeArchive(archive(directory, ticket));
  connection.abort();

  // Without the commit, the upload has no effect.
  void requests.write({ message: { case: "commit", value: { digest: written.digest } } });
  const { value: last } = await answers.next();
  if (last?.message.case !== "uploaded") throw new Error("the stream was cut");
  requests.close();
  return { artifactId: last.message.value.artifactId, digest: written.digest };
}

async function* archive(
  directory: string,
  ticket: string,
): AsyncGenerator<MessageInitShape<typeof WriteArchiveRequestSchema>> {
  yield { message: { case: "open", value: { ticket } } };
  for await (const data of pack(directory)) {
    yield { message: { case: "data", value: data } };
  }
  yield { message: { case: "commit", value: {} } };
}
// docs:end

function pack(directory: string): AsyncIterable<Buffer> {
  const archive = tar.pack();
  for (const name of list(directory)) {
    const path = join(directory, name);
    const stat = lstatSync(path);
    const header = { name, mode: stat.mode & 0o7777, mtime: stat.mtime, uid: stat.uid, gid: stat.gid };
    if (stat.isDirectory()) archive.entry({ ...header, type: "directory" });
    else if (stat.isSymbolicLink()) archive.entry({ ...header, type: "symlink", linkname: readlinkSync(path) });
    else if (stat.isFile()) archive.entry({ ...header, size: stat.size }, readFileSync(path));
  }
  archive.finalize();
  return archive as AsyncIterable<Buffer>;
}

/** Returns all names below a directory without following symbolic links. */
function list(directory: string, below = ""): string[] {
  const entries = readdirSync(join(directory, below), { withFileTypes: true });
  return entries.flatMap((entry) => {
    const name = join(below, entry.name);
    return entry.isDirectory() ? [name, ...list(directory, name)] : [name];
  });
}

/** Returns files with their contents, and symbolic links with their targets. */
function readAll(directory: string) {
  const files = new Map<string, Buffer | string>();
  for (const name of list(directory)) {
    const path = join(directory, name);
    const stat = lstatSync(path);
    if (stat.isSymbolicLink()) files.set(name, readlinkSync(path));
    else if (stat.isFile()) files.set(name, readFileSync(path));
  }
  return files;
}

// docs:submit
function spec(artifactId: string, buildId: string, tags: string[] = []) {
  const bytes = new TextEncoder();
  const script = "cp -a src/. out && head -c 40M /dev/zero >&2 && seq -f 'line %06.0f' 0 39999";
  return create(WorkloadSpecSchema, {
    team,
    kind: WorkloadKind.TASK,
    image: { source: { case: "host", value: {} } },
    command: ["sh", "-c", script].map((argument) => bytes.encode(argument)),
    stdin: StdinMode.NONE,
    output: OutputMode.ATTACHED,
    inputs: [{ name: "src", artifactId, access: Access.READ_ONLY }],
    outputs: [{ name: "out" }],
    privilege: Privilege.CONFINED,
    network: Network.NONE,
    tags,
    buildId,
  });
}
// docs:end

// docs:watch
/** Follows a workload until a wanted event. Returns the revision from which the next call resumes. */
async function watch<Case extends NonNullable<WatchResponse["event"]["case"]>>(
  workloadId: string,
  wanted: Case,
  afterRevision = 0n,
) {
  for await (const { revision, event } of workloads.watch({ team, workloadId, afterRevision })) {
    console.log(`watched: ${event.case}`);
    if (event.case === wanted) {
      return { revision, value: event.value as Extract<WatchResponse["event"], { case: Case }>["value"] };
    }
    if (event.case === "finished") throw new Error(`ended early: ${event.value.failure?.message}`);
  }
  throw new Error("the stream was cut");
}
// docs:end

// docs:attach
/** Returns both outputs completely. Its connection breaks once. */
async function attach({ gatewayEndpoint, workerId, attemptId }: AttemptLocation) {
  const [stdout, stderr] = [new Output(), new Output()];
  const offsets = () => ({ stdoutOffset: BigInt(stdout.length), stderrOffset: BigInt(stderr.length) });
  let [connections, done] = [0, false];
  while (!done) {
    connections++;
    const { connection, transport } = gateway(gatewayEndpoint);
    const broken = new AbortController();
    const requests = createWritableIterable<MessageInitShape<typeof AttachRequestSchema>>();
    const resume = { team, workerId, processId: attemptId, ...offsets() };
    // The reader of the responses reports send errors.
    const say = (message: MessageInitShape<typeof AttachRequestSchema>["message"]) =>
      requests.write({ message }).catch(() => undefined);
    void say({ case: "resume", value: resume });
    try {
      const answers = createClient(Containers, transport).attach(requests, { signal: broken.signal });
      for await (const { message } of answers) {
        if (message.case === "output") {
          const output = message.value.stream === Stream.STDOUT ? stdout : stderr;
          output.push(message.value.offset, message.value.data);
          // Acknowledge both outputs, even if one is discarded. The worker then drops the bytes, and the process continues.
          void say({ case: "ack", value: offsets() });
          if (connections === 1 && stdout.length >= breakAfter) broken.abort();
        }
        if (message.case === "done") {
          done = true;
          requests.close();
        }
      }
    } catch (error) {
      if (!broken.signal.aborted) throw error;
    } finally {
      connection.abort();
    }
  }
  return { stdout: Buffer.concat(stdout.parts), stderr: Buffer.concat(stderr.parts), connections };
}

class Output {
  readonly parts: Uint8Array[] = [];
  length = 0;

  push(offset: bigint, data: Uint8Array) {
    strictEqual(offset, BigInt(this.length), "out of order");
    this.parts.push(data);
    this.length += data.length;
  }
}
// docs:end

// docs:download
async function download(artifactId: string) {
  const found = await streamer.download({ team, artifactId });
  if (found.endpoint === undefined) throw new Error("no worker was named");
  const { connection, transport } = gateway(found.endpoint.gatewayEndpoint);
  const parts: Uint8Array[] = [];
  let digest: Uint8Array | undefined;
  for await (const { message } of createClient(Volumes, transport).readArchive({ ticket: found.endpoint.ticket })) {
    if (message.case === "data") parts.push(message.value);
    if (message.case === "done") digest = message.value.digest;
  }
  connection.abort();
  deepStrictEqual(digest, found.digest, "the stream was cut");
  return { files: await unpack(parts), digest: found.digest };
}
// docs:end

async function unpack(parts: Uint8Array[]) {
  const files = new Map<string, Buffer | string>();
  for await (const entry of Readable.from(parts).pipe(tar.extract())) {
    const content = await buffer(entry);
    const name = entry.header.name.replace(/^\.\//, "");
    if (entry.header.type === "file") files.set(name, content);
    if (entry.header.type === "symlink") files.set(name, entry.header.linkname ?? "");
  }
  return files;
}

// docs:refused
/** Returns the reason of an error, as listed in docs/errors.md. */
function errorInfo(error: unknown) {
  const failure = ConnectError.from(error);
  const [info] = failure.findDetails(ErrorInfoSchema);
  if (info === undefined) throw failure; // The error does not come from Gantry.
  return { code: failure.code, info };
}
// docs:end

async function main(directory: string) {
  const [workloadId, buildId] = [randomUUID(), randomUUID()];
  await owners.putBuild({ buildId, team, endsWithWorkloadId: workloadId });

  const { artifactId, digest } = await upload(directory, buildId);
  console.log(`uploaded: ${artifactId}, digest ${Buffer.from(digest).toString("hex")}`);

  await workloads.submit({ workloadId, spec: spec(artifactId, buildId) });
  console.log(`submitted: ${workloadId}`);

  const { revision, value: running } = await watch(workloadId, "running");
  ok(running.location);
  const { stdout, stderr, connections } = await attach(running.location);
  const lines = Array.from({ length: 40_000 }, (_, number) => `line ${String(number).padStart(6, "0")}\n`);
  ok(stdout.equals(Buffer.from(lines.join(""))) && stderr.equals(Buffer.alloc(errors)), "each byte once, in order");
  ok(connections > 1, "the connection was broken");
  const sha256 = createHash("sha256").update(stdout).digest("hex");
  console.log(`attached: ${stdout.length} and ${stderr.length} bytes over ${connections} connections, sha256 ${sha256}`);

  const { value: finished } = await watch(workloadId, "finished", revision);
  strictEqual(finished.outcome, Outcome.SUCCEEDED);

  const [copy] = finished.outputs;
  ok(copy);
  const downloaded = await download(copy.artifactId);
  deepStrictEqual(downloaded.digest, copy.digest);
  deepStrictEqual(downloaded.files, readAll(directory), "the copy differs from the original");
  console.log(`downloaded: ${downloaded.files.size} files, digest ${Buffer.from(copy.digest).toString("hex")}`);

  // docs:explain
  const impossible = spec(artifactId, buildId, ["no-such-worker"]);
  const refusal = await workloads.submit({ workloadId: randomUUID(), spec: impossible }).then(() => {
    throw new Error("not refused");
  }, errorInfo);
  deepStrictEqual([refusal.code, refusal.info.reason], [Code.FailedPrecondition, "NO_COMPATIBLE_WORKER"]);
  console.log(`refused: ${refusal.info.reason} of ${refusal.info.domain}, ${JSON.stringify(refusal.info.metadata)}`);

  const explained = await placements.explain({ subject: { case: "spec", value: impossible } });
  strictEqual(explained.verdict, Verdict.NEVER);
  console.log(`explained: never, unless ${explained.unblockedBy.join(" or ")}`);
  // docs:end

  for (const { connection } of [scheduler, artifacts, streaming]) connection.abort();
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  await main(process.argv[2] ?? ".");
}
