//! Uploads a directory, runs a command that copies it and writes output, follows the command, and
//! downloads the copy. docs/clients.md explains each step.

mod retry;

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail, ensure};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};
use tonic_types::{ErrorInfo, StatusExt};
use uuid::Uuid;

use gantry::artifacts::v1::PutBuildRequest;
use gantry::artifacts::v1::owners_client::OwnersClient;
use gantry::runtime::v1::containers_client::ContainersClient;
use gantry::runtime::v1::volumes_client::VolumesClient;
use gantry::runtime::v1::{
    Ack, AttachRequest, ReadArchiveRequest, Resume, Stream, WriteArchiveRequest, WriteCommit, WriteOpen,
    attach_request, attach_response, read_archive_response, write_archive_request,
};
use gantry::scheduler::v1::placements_client::PlacementsClient;
use gantry::scheduler::v1::watch_response::Event;
use gantry::scheduler::v1::workloads_client::WorkloadsClient;
use gantry::scheduler::v1::{
    Access, AttemptLocation, ExplainRequest, HostImage, Image, Input, Network, Outcome, Output, OutputMode,
    Privilege, StdinMode, SubmitRequest, Verdict, WatchRequest, WorkloadKind, WorkloadSpec,
    explain_request, image,
};
use gantry::streamer::v1::streamer_client::StreamerClient;
use gantry::streamer::v1::{
    DownloadRequest, UploadCommit, UploadOpen, UploadRequest, upload_request, upload_response,
};
use retry::retry;

include!(concat!(env!("OUT_DIR"), "/protos.rs"));

const BREAK_AFTER: usize = 100_000;
/// More output than a worker keeps without acknowledgement. A caller that does not acknowledge
/// standard error waits forever.
const ERRORS: usize = 40 << 20;
const WORKLOADS: &str = "gantry.scheduler.v1.Workloads";

// docs:connect
/// GANTRY_SERVER: one address for all services, or `scheduler=…,artifacts=…,streamer=…,proxy=…`.
fn addresses() -> anyhow::Result<HashMap<String, String>> {
    let server = std::env::var("GANTRY_SERVER").context("GANTRY_SERVER")?;
    if !server.contains('=') {
        let services = ["scheduler", "artifacts", "streamer", "proxy"];
        return Ok(services.map(|service| (service.to_owned(), server.clone())).into());
    }
    let parts = server.split(',').filter_map(|part| part.split_once('='));
    Ok(parts.map(|(service, address)| (service.to_owned(), address.to_owned())).collect())
}

/// Adds the cluster token to each call.
#[derive(Clone)]
struct Bearer(Option<MetadataValue<Ascii>>);

impl Bearer {
    fn read() -> anyhow::Result<Self> {
        let Ok(file) = std::env::var("GANTRY_TOKEN_FILE") else { return Ok(Self(None)) };
        let token = std::fs::read_to_string(&file).context(file)?;
        Ok(Self(Some(format!("Bearer {}", token.trim()).parse()?)))
    }
}

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Self(Some(token)) = self {
            request.metadata_mut().insert("authorization", token.clone());
        }
        Ok(request)
    }
}

type Service = InterceptedService<Channel, Bearer>;

fn connect(address: &str, bearer: &Bearer) -> anyhow::Result<Service> {
    let channel = Endpoint::from_shared(address.to_owned())?.connect_lazy();
    Ok(InterceptedService::new(channel, bearer.clone()))
}
// docs:end

struct Client {
    team: String,
    addresses: HashMap<String, String>,
    bearer: Bearer,
    workloads: WorkloadsClient<Service>,
    placements: PlacementsClient<Service>,
    owners: OwnersClient<Service>,
    streamer: StreamerClient<Service>,
}

impl Client {
    fn new() -> anyhow::Result<Self> {
        let (addresses, bearer) = (addresses()?, Bearer::read()?);
        let service = |name| connect(addresses.get(name).context("GANTRY_SERVER lacks a service")?, &bearer);
        Ok(Self {
            team: std::env::var("GANTRY_TEAM").unwrap_or_else(|_| "main".to_owned()),
            workloads: WorkloadsClient::new(service("scheduler")?),
            placements: PlacementsClient::new(service("scheduler")?),
            owners: OwnersClient::new(service("artifacts")?),
            streamer: StreamerClient::new(service("streamer")?),
            addresses,
            bearer,
        })
    }

    /// Connects to the gateway of a worker, or to the proxy if there is one.
    fn gateway(&self, endpoint: &str) -> anyhow::Result<Service> {
        connect(self.addresses.get("proxy").map_or(endpoint, String::as_str), &self.bearer)
    }

    // docs:upload
    async fn upload(&self, directory: &Path, build_id: &str) -> anyhow::Result<(String, Vec<u8>)> {
        use upload_request::Message;
        let (requests, stream) = mpsc::channel(1);
        let open = UploadOpen {
            team: self.team.clone(),
            artifact_id: Uuid::new_v4().to_string(),
            digest: Vec::new(),
            build_id: build_id.to_owned(),
            label: "src".to_owned(),
            ..UploadOpen::default()
        };
        requests.send(UploadRequest { message: Some(Message::Open(open)) }).await?;
        let mut answers = self.streamer.clone().upload(ReceiverStream::new(stream)).await?.into_inner();
        let answer = answers.message().await?.and_then(|answer| answer.message);
        let Some(upload_response::Message::Endpoint(endpoint)) = answer else { bail!("the stream was cut") };

        let mut volumes = VolumesClient::new(self.gateway(&endpoint.gateway_endpoint)?);
        let archive = tokio_stream::iter(archive(directory, endpoint.ticket)?);
        let digest = volumes.write_archive(archive).await?.into_inner().digest;

        // Without the commit, the upload has no effect.
        let commit = UploadCommit { digest: digest.clone() };
        requests.send(UploadRequest { message: Some(Message::Commit(commit)) }).await?;
        let answer = answers.message().await?.and_then(|answer| answer.message);
        let Some(upload_response::Message::Uploaded(uploaded)) = answer else { bail!("the stream was cut") };
        Ok((uploaded.artifact_id, digest))
    }
    // docs:end

    // docs:submit
    fn spec(&self, artifact_id: &str, build_id: &str, tags: &[&str]) -> WorkloadSpec {
        let script = "cp -a src/. out && head -c 40M /dev/zero >&2 && seq -f 'line %06.0f' 0 39999";
        WorkloadSpec {
            team: self.team.clone(),
            kind: WorkloadKind::Task.into(),
            image: Some(Image { source: Some(image::Source::Host(HostImage {})), entrypoint: None }),
            command: ["sh", "-c", script].map(Vec::from).into(),
            stdin: StdinMode::None.into(),
            output: OutputMode::Attached.into(),
            inputs: vec![Input {
                name: "src".to_owned(),
                artifact_id: artifact_id.to_owned(),
                access: Access::ReadOnly.into(),
                ..Input::default()
            }],
            outputs: vec![Output { name: "out".to_owned(), ..Output::default() }],
            privilege: Privilege::Confined.into(),
            network: Network::None.into(),
            tags: tags.iter().copied().map(str::to_owned).collect(),
            build_id: build_id.to_owned(),
            ..WorkloadSpec::default()
        }
    }

    async fn submit(&self, workload_id: &str, spec: &WorkloadSpec) -> Result<(), Status> {
        let request = SubmitRequest { workload_id: workload_id.to_owned(), spec: Some(spec.clone()) };
        retry(WORKLOADS, "Submit", async || self.workloads.clone().submit(request.clone()).await).await?;
        Ok(())
    }
    // docs:end

    // docs:watch
    /// Follows a workload until a wanted event. Returns the revision from which the next call
    /// resumes.
    async fn watch<T>(
        &self,
        workload_id: &str,
        after_revision: u64,
        wanted: impl Fn(&Event) -> Option<T>,
    ) -> anyhow::Result<(u64, T)> {
        let (team, workload_id) = (self.team.clone(), workload_id.to_owned());
        let request = WatchRequest { team, workload_id, after_revision };
        let watch = async || self.workloads.clone().watch(request.clone()).await;
        let mut events = retry(WORKLOADS, "Watch", watch).await?;
        while let Some(answer) = events.message().await? {
            let Some(event) = answer.event else { continue }; // An event of a newer scheduler.
            println!("watched: {}", name(&event));
            if let Some(found) = wanted(&event) {
                return Ok((answer.revision, found));
            }
            ensure!(!matches!(event, Event::Finished(_)), "ended early: {event:?}");
        }
        bail!("the stream was cut")
    }
    // docs:end

    // docs:attach
    /// Returns both outputs completely. Its connection breaks once.
    async fn attach(&self, at: &AttemptLocation) -> anyhow::Result<(Vec<u8>, Vec<u8>, u32)> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        for connections in 1.. {
            let mut containers = ContainersClient::new(self.gateway(&at.gateway_endpoint)?);
            let (requests, stream) = mpsc::channel(16);
            let resume = Resume {
                team: self.team.clone(),
                process_id: at.attempt_id.clone(),
                worker_id: at.worker_id.clone(),
                stdout_offset: stdout.len() as u64,
                stderr_offset: stderr.len() as u64,
                ..Resume::default()
            };
            requests.send(AttachRequest { message: Some(attach_request::Message::Resume(resume)) }).await?;
            let mut said = containers.attach(ReceiverStream::new(stream)).await?.into_inner();
            // Leaving this loop drops and thereby breaks the connection.
            while connections > 1 || stdout.len() < BREAK_AFTER {
                let message = said.message().await?.context("the stream was cut")?.message;
                match message {
                    Some(attach_response::Message::Output(piece)) => {
                        let output = if piece.stream() == Stream::Stdout { &mut stdout } else { &mut stderr };
                        ensure!(piece.offset == output.len() as u64, "out of order");
                        output.extend(piece.data);
                        // Acknowledge both outputs, even if one is discarded. The worker then drops
                        // the bytes, and the process continues.
                        let (stdout_offset, stderr_offset) = (stdout.len() as u64, stderr.len() as u64);
                        let ack = Ack { stdout_offset, stderr_offset };
                        let ack = attach_request::Message::Ack(ack);
                        // If the call has ended, its responses have the reason.
                        requests.send(AttachRequest { message: Some(ack) }).await.ok();
                    }
                    Some(attach_response::Message::Done(_)) => return Ok((stdout, stderr, connections)),
                    _ => {}
                }
            }
        }
        unreachable!("it returns")
    }
    // docs:end

    // docs:download
    async fn download(&self, artifact_id: &str) -> anyhow::Result<(BTreeMap<String, Vec<u8>>, Vec<u8>)> {
        let request = DownloadRequest {
            team: self.team.clone(),
            artifact_id: artifact_id.to_owned(),
            ..DownloadRequest::default()
        };
        let download = async || self.streamer.clone().download(request.clone()).await;
        let found = retry("gantry.streamer.v1.Streamer", "Download", download).await?;
        let endpoint = found.endpoint.context("no worker was named")?;
        let mut volumes = VolumesClient::new(self.gateway(&endpoint.gateway_endpoint)?);
        let request = ReadArchiveRequest { ticket: endpoint.ticket, path: Vec::new() };
        let mut parts = volumes.read_archive(request).await?.into_inner();
        let (mut content, mut digest) = (Vec::new(), None);
        while let Some(part) = parts.message().await? {
            match part.message {
                Some(read_archive_response::Message::Data(data)) => content.extend(data),
                Some(read_archive_response::Message::Done(done)) => digest = Some(done.digest),
                None => {}
            }
        }
        ensure!(digest.as_ref() == Some(&found.digest), "the stream was cut");
        Ok((unpack(&content)?, found.digest))
    }
    // docs:end
}

/// Returns the requests of WriteArchive.
fn archive(directory: &Path, ticket: String) -> std::io::Result<Vec<WriteArchiveRequest>> {
    use write_archive_request::Message;
    let mut tar = tar::Builder::new(Vec::new());
    tar.follow_symlinks(false);
    tar.append_dir_all(".", directory)?;
    let content = tar.into_inner()?;
    let data = content.chunks(256 * 1024).map(|data| Message::Data(data.to_vec()));
    let messages = std::iter::once(Message::Open(WriteOpen { ticket })).chain(data);
    let messages = messages.chain([Message::Commit(WriteCommit {})]);
    Ok(messages.map(|message| WriteArchiveRequest { message: Some(message) }).collect())
}

fn unpack(content: &[u8]) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for entry in tar::Archive::new(content).entries()? {
        let mut entry = entry?;
        let name = entry.path()?.to_string_lossy().trim_start_matches("./").to_owned();
        if entry.header().entry_type().is_file() {
            let mut content = Vec::new();
            entry.read_to_end(&mut content)?;
            files.insert(name, content);
        } else if let Some(target) = entry.link_name()?.filter(|_| entry.header().entry_type().is_symlink()) {
            files.insert(name, format!("-> {}", target.display()).into());
        }
    }
    Ok(files)
}

/// Returns files with their contents, and symbolic links as `-> target`.
fn read_all(root: &Path, directory: &Path, files: &mut BTreeMap<String, Vec<u8>>) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.strip_prefix(root)?.to_string_lossy().into_owned();
        if path.is_symlink() {
            files.insert(name, format!("-> {}", path.read_link()?.display()).into());
        } else if path.is_dir() {
            read_all(root, &path, files)?;
        } else if path.is_file() {
            files.insert(name, std::fs::read(&path)?);
        }
    }
    Ok(())
}

fn name(event: &Event) -> &'static str {
    match event {
        Event::Queued(_) => "queued",
        Event::Placed(_) => "placed",
        Event::Materializing(_) => "materializing",
        Event::Preparing(_) => "preparing",
        Event::Running(_) => "running",
        Event::Publishing(_) => "publishing",
        Event::Finished(_) => "finished",
    }
}

// docs:refused
/// Returns the reason of an error, as listed in docs/errors.md.
fn error_info(status: &Status) -> anyhow::Result<ErrorInfo> {
    status.get_details_error_info().with_context(|| format!("the error does not come from Gantry: {status}"))
}
// docs:end

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let directory = std::env::args().nth(1).context("which directory?")?;
    let directory = Path::new(&directory);
    let client = Client::new()?;
    let (workload_id, build_id) = (Uuid::new_v4().to_string(), Uuid::new_v4().to_string());
    let build = PutBuildRequest {
        build_id: build_id.clone(),
        team: client.team.clone(),
        ends_with_workload_id: workload_id.clone(),
        ..PutBuildRequest::default()
    };
    let put = async || client.owners.clone().put_build(build.clone()).await;
    retry("gantry.artifacts.v1.Owners", "PutBuild", put).await?;

    let (artifact_id, digest) = client.upload(directory, &build_id).await?;
    println!("uploaded: {artifact_id}, digest {}", hex(&digest));

    client.submit(&workload_id, &client.spec(&artifact_id, &build_id, &[])).await?;
    println!("submitted: {workload_id}");

    let runs = |event: &Event| match event {
        Event::Running(running) => running.location.clone(),
        _ => None,
    };
    let (revision, location) = client.watch(&workload_id, 0, runs).await?;
    let (stdout, stderr, connections) = client.attach(&location).await?;
    let expected: String = (0..40_000).map(|number| format!("line {number:06}\n")).collect();
    ensure!(stdout == expected.as_bytes() && stderr == vec![0; ERRORS], "not each byte once, in order");
    ensure!(connections > 1, "the connection was not broken");
    let (sha256, stdout, stderr) = (hex(&Sha256::digest(&stdout)), stdout.len(), stderr.len());
    println!("attached: {stdout} and {stderr} bytes over {connections} connections, sha256 {sha256}");

    let has_finished = |event: &Event| match event {
        Event::Finished(finished) => Some(finished.clone()),
        _ => None,
    };
    let (_, finished) = client.watch(&workload_id, revision, has_finished).await?;
    ensure!(finished.outcome() == Outcome::Succeeded, "{finished:?}");

    let copy = &finished.outputs[0];
    let (files, digest) = client.download(&copy.artifact_id).await?;
    ensure!(digest == copy.digest, "the output has another digest than was said");
    let mut originals = BTreeMap::new();
    read_all(directory, directory, &mut originals)?;
    ensure!(files == originals, "the copy differs from the original");
    println!("downloaded: {} files, digest {}", files.len(), hex(&digest));

    // docs:explain
    let impossible = client.spec(&artifact_id, &build_id, &["no-such-worker"]);
    let refused = client.submit(&Uuid::new_v4().to_string(), &impossible).await;
    let status = refused.err().context("not refused")?;
    let info = error_info(&status)?;
    ensure!(status.code() == Code::FailedPrecondition && info.reason == "NO_COMPATIBLE_WORKER", "{status}");
    println!("refused: {} of {}, {:?}", info.reason, info.domain, info.metadata);

    let request = ExplainRequest { subject: Some(explain_request::Subject::Spec(impossible)), ..Default::default() };
    let explain = async || client.placements.clone().explain(request.clone()).await;
    let explained = retry("gantry.scheduler.v1.Placements", "Explain", explain).await?;
    ensure!(explained.verdict() == Verdict::Never, "{explained:?}");
    println!("explained: never, unless {}", explained.unblocked_by.join(" or "));
    // docs:end
    Ok(())
}

#[cfg(test)]
mod golden;
