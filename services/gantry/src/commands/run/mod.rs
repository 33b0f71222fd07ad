//! `gantry run`: uploads inputs, submits a workload, follows it to its end, and downloads outputs.

mod hint;
mod spec;
mod trace;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use domain::{ArtifactId, BuildId, WorkloadId};
use futures::future::try_join_all;
use rpc::Reason;
use rpc::pb::artifacts::PutBuildRequest;
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::image::Source as ImageSource;
use rpc::pb::scheduler::{
    CacheMount, Finished, GetWorkerRequest, Network, Outcome, PublishedOutput, SubmitRequest, WorkloadSpec,
};
use serde_json::json;
use server::telemetry::{self, RecentSpans, Telemetry};
use tracing::{Instrument, info_span};
use transfer::Manifest;

use self::spec::{artifact_of, forwards_stdin, spec, spec_input, spec_inputs};
use crate::cli::args::{Global, RunArgs};
use crate::cli::environment::exports_spans;
use crate::cli::values::Source;
use crate::client::connect::{Connection, Service};
use crate::client::placement::{self, WorkerChoice};
use crate::client::{caches, queries, why};
use crate::ending::error::{self, Interrupted, Refused, refusal};
use crate::ending::signals::Signals;
use crate::follow::end::{Delivery, end};
use crate::follow::{Follow, FollowResult, GRACE, OnSignal, cancel};
use crate::render::stdout;
use crate::render::ui::Ui;
use crate::render::{explanation, json as shown};
use crate::transfer::directories::{inside, is_in_place};
use crate::transfer::download::Downloader;
use crate::transfer::images::bring;
use crate::transfer::upload::{Directory, Uploader, renew};

/// The capability of workers with private networks.
const PRIVATE_NETWORK: &str = "network-private";
/// The reason of a workload with an input that has no usable replica.
const INPUT_UNAVAILABLE: &str = "INPUT_UNAVAILABLE";

/// Executes `gantry run`, and writes a trace if `--trace` is given. Returns the exit code.
pub(crate) async fn run(args: &RunArgs, global: &Global, ui: &Ui) -> anyhow::Result<u8> {
    let spans = args.trace.is_some().then(RecentSpans::default);
    let telemetry: Option<Telemetry> = (spans.is_some() || exports_spans())
        .then(|| telemetry::init("gantry", "warn", spans.clone()))
        .transpose()?;
    let connection = Connection::open(global, ui).await?;

    let root = info_span!(target: "gantry", "gantry run", service = "gantry");
    let (trace_id, result) = async {
        let result = run_on(args, &connection, ui, global.json).await;
        (trace::current_id(), result)
    }
    .instrument(root)
    .await;

    if let (Some(file), Some(spans), Some(trace_id)) = (&args.trace, &spans, trace_id)
        && let Err(error) =
            trace::write((file, args.allow.follow_links), &trace_id, spans, &connection, ui).await
    {
        ui.warn(&error::describe(&error));
    }
    drop(telemetry);
    result
}

/// Executes `gantry run` on a cluster, and returns the exit code.
async fn run_on(args: &RunArgs, connection: &Connection, ui: &Ui, as_json: bool) -> anyhow::Result<u8> {
    let mut signals = Signals::catch()?;
    if args.privileged {
        ui.note("--privileged: the command can do everything that root can do on the worker");
    }
    let spec = spec(args, &connection.team, ui)?;
    if args.explain {
        let known = caches::existing_mounts(connection, &args.caches).await?;
        let spec = WorkloadSpec { caches: known, ..spec };
        // Directories are not uploaded yet, and do not affect which workers can run the command.
        let there = args.inputs.iter().filter_map(|input| Some((input, artifact_of(&input.source)?)));
        let spec = WorkloadSpec { inputs: there.map(spec_input).collect(), ..spec };
        let response = placement::explain(connection, Subject::Spec(spec), &WorkerChoice::default()).await?;
        if as_json {
            stdout::print_json(&shown::explanation(&response))?;
        } else {
            stdout::print(&explanation::text(&response, false))?;
        }
        return Ok(0);
    }
    let Some(mut ran) = run_once(args, connection, ui, &mut signals, &spec, as_json).await? else {
        return Ok(0);
    };
    let lost = lost_directories(connection, args, &ran).await;
    if !lost.is_empty() {
        let names = lost.join(", ");
        ui.note(&format!("{names}: the cluster has lost the earlier upload; uploading again"));
        match run_once(args, connection, ui, &mut signals, &spec, as_json).await? {
            Some(again) => ran = again,
            None => return Ok(0),
        }
    }
    let RanWorkload { workload, mut followed, sent, .. } = ran;
    if let Some(failure) = &mut followed.finished.failure
        && failure.reason.starts_with("PROGRAM_NOT_")
        && let Some(program) = args.entrypoint.as_ref().filter(|it| !it.is_empty()).or(args.command.first())
    {
        failure.message = format!("{}: {}", program.display(), failure.message);
    }
    let downloaded = tokio::select! {
        downloaded = download(args, connection, ui, &followed, &sent) => downloaded,
        code = signals.next() => {
            let outputs = followed.finished.outputs.iter();
            let kept: Vec<_> =
                outputs.map(|output| format!("{} as artifact {}", output.name, output.artifact_id)).collect();
            ui.note(&format!("interrupted during the download of results; they are kept: {}", kept.join(", ")));
            return Err(Interrupted(code).into());
        }
    };
    let code = end(ui, &followed, &downloaded);
    if let Some(hint) = hint::hint(args, &followed.finished, Path::exists) {
        ui.note(&hint);
    } else if code != 0 && followed.cancel_code.is_none() && std::io::stderr().is_terminal() {
        hint_at_container(connection, ui, &workload.to_string(), &followed.finished).await;
    }
    ui.event("finished", shown::finished(&followed.finished, code));
    Ok(code)
}

/// A workload that has ended.
struct RanWorkload {
    workload: WorkloadId,
    followed: FollowResult,
    /// Artifact of each input.
    inputs: Vec<ArtifactId>,
    /// Uploaded trees of inputs in place, by name.
    sent: HashMap<String, Arc<Manifest>>,
}

/// Uploads the inputs, submits a workload, and follows it to its end. `None`: it is detached.
async fn run_once(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    signals: &mut Signals,
    spec: &WorkloadSpec,
    as_json: bool,
) -> anyhow::Result<Option<RanWorkload>> {
    let workload = WorkloadId::random();

    // If the command ends before the workload is submitted, uploads are deleted after
    // --abandoned-after.
    let RunInputs { inputs, sent, build, caches, images } = tokio::select! {
        prepared = prepare(args, connection, ui, workload) => prepared?,
        code = signals.next() => {
            ui.note("interrupted before the command was submitted; nothing runs");
            return Err(Interrupted(code).into());
        }
    };
    let spec = WorkloadSpec {
        inputs: spec_inputs(args, &inputs),
        build_id: build.map(|build| build.to_string()).unwrap_or_default(),
        caches,
        ..spec.clone()
    };
    let spec = with_images(spec, &images);
    tokio::select! {
        submitted = submit_in_some_network(args, connection, ui, workload, spec) => submitted?,
        code = signals.next() => {
            // The scheduler may have accepted the workload.
            ui.note(&format!("interrupted; workload {workload} is cancelled if it was submitted"));
            _ = tokio::time::timeout(Duration::from_secs(2), cancel(connection, workload.to_string(), GRACE)).await;
            return Err(Interrupted(code).into());
        }
    }
    ui.event("submitted", json!({ "workload_id": workload.to_string() }));
    if args.detach {
        if !as_json {
            stdout::print(&format!("{workload}\n"))?;
        }
        if args.tty && forwards_stdin(args) {
            let team = connection.team_option();
            ui.note(&format!(
                "attach with \"gantry{team} attach {workload}\"; its input ends if no caller attaches within 5 min"
            ));
        }
        return Ok(None);
    }
    if let [services @ .., last] = &args.services[..] {
        let others = services.iter().map(|service| format!("{}, ", service.name)).collect::<String>();
        let last = &last.name;
        ui.note(&format!("the command starts when its services are ready: {others}{last}; `gantry logs --service {last} {workload}` prints the output of {last}"));
    }

    let follow = Follow {
        connection,
        ui,
        workload: workload.to_string(),
        on_signal: OnSignal::Cancel,
        narrate: true,
        stdin: forwards_stdin(args),
        acknowledge: true,
        terminal: args.tty.then_some(&args.keys.keys),
        tail: None,
        since: None,
    };
    let followed = follow.run(signals).await.inspect_err(|error| {
        if matches!(error.downcast_ref(), Some(Interrupted(0))) && !args.outputs.is_empty() {
            ui.note("outputs are not downloaded; `gantry attach` prints how to download them at its end");
        }
    });
    Ok(Some(RanWorkload { workload, followed: followed?, inputs, sent }))
}

/// Returns the names of the directories because of whose artifacts the workload did not start: no
/// replica is left. The cluster may have had them from an earlier command.
async fn lost_directories<'a>(connection: &Connection, args: &'a RunArgs, ran: &RanWorkload) -> Vec<&'a str> {
    let finished = &ran.followed.finished;
    let is_lost = finished.failure.as_ref().is_some_and(|it| it.reason == INPUT_UNAVAILABLE);
    if !is_lost || finished.exit.is_some() || ran.followed.cancel_code.is_some() {
        return Vec::new();
    }
    let mut lost = Vec::new();
    for (input, artifact) in args.inputs.iter().zip(&ran.inputs) {
        if matches!(input.source, Source::Directory(_))
            && let Ok(found) = queries::artifact(connection, &artifact.to_string()).await
            && found.replicas.is_empty()
            && !found.in_store
        {
            lost.push(input.name.as_str());
        }
    }
    lost
}

/// Prints how to look into the container of a command that failed, if its worker allows that.
async fn hint_at_container(connection: &Connection, ui: &Ui, workload: &str, finished: &Finished) {
    let (Some(_), Some(location)) = (&finished.exit, &finished.location) else { return };
    let request = GetWorkerRequest { worker: location.worker_id.clone() };
    let mut workers = connection.workers();
    let answer = tokio::time::timeout(Duration::from_secs(2), workers.get_worker(request)).await;
    let Ok(Ok(response)) = answer else { return };
    let labels = response.into_inner().worker.and_then(|worker| worker.labels);
    if labels.is_some_and(|labels| labels.capabilities.iter().any(|has| has == "exec-ended")) {
        let team = connection.team_option();
        ui.note(&format!(
            "look inside with \"gantry{team} exec -it {workload} sh\" in the next 5 min (`--gc-grace` of the cluster)"
        ));
    }
}

/// Inputs and owners that a workload needs before it is submitted.
struct RunInputs {
    /// Artifact of each input.
    inputs: Vec<ArtifactId>,
    /// Uploaded trees of inputs in place, by name.
    sent: HashMap<String, Arc<Manifest>>,
    /// Build that owns the inputs and outputs, if there are any.
    build: Option<BuildId>,
    /// Caches that the workload mounts.
    caches: Vec<CacheMount>,
    /// Artifacts of the image and of those of services, unless the cluster has them.
    images: Vec<Option<ArtifactId>>,
}

async fn prepare(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    workload: WorkloadId,
) -> anyhow::Result<RunInputs> {
    let images = [&args.image].into_iter().chain(args.services.iter().map(|service| &service.image));
    let images = try_join_all(images.map(|image| bring(connection, ui, image, args.platform.as_ref())));
    let inputs = prepare_inputs(args, connection, ui, workload);
    let (images, (inputs, sent, build)) = tokio::try_join!(images, inputs)?;
    let caches = caches::mounts(connection, &args.caches).await?;
    Ok(RunInputs { inputs, sent, build, caches, images })
}

/// Replaces images by their artifacts: first that of the process, then those of its services.
fn with_images(mut spec: WorkloadSpec, artifacts: &[Option<ArtifactId>]) -> WorkloadSpec {
    let images =
        [&mut spec.image].into_iter().chain(spec.services.iter_mut().map(|service| &mut service.image));
    for (image, artifact) in images.zip(artifacts) {
        if let (Some(image), Some(artifact)) = (image, artifact) {
            image.source = Some(ImageSource::ArtifactId(artifact.to_string()));
        }
    }
    spec
}

async fn prepare_inputs(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    workload: WorkloadId,
) -> anyhow::Result<(Vec<ArtifactId>, HashMap<String, Arc<Manifest>>, Option<BuildId>)> {
    let uploads = args.inputs.iter().any(|input| matches!(input.source, Source::Directory(_)));
    if !uploads && args.outputs.is_empty() {
        let artifacts = args.inputs.iter().filter_map(|input| artifact_of(&input.source)).collect();
        return Ok((artifacts, HashMap::new(), None));
    }
    let build = BuildId::new();
    let put = PutBuildRequest {
        build_id: build.to_string(),
        team: connection.team.clone(),
        ends_with_workload_id: workload.to_string(),
        keep: Some(rpc::duration(args.keep)),
        term: Some(rpc::duration(args.abandoned_after)),
        ..Default::default()
    };
    let owners = connection.owners();
    connection
        .repeat(Service::ArtifactStore, "cannot prepare the run", async || {
            owners.clone().put_build(put.clone()).await
        })
        .instrument(info_span!(target: "gantry", "put build", service = "gantry"))
        .await?;
    let inputs = tokio::select! {
        inputs = upload(args, connection, ui, build) => inputs?,
        error = renew(connection, put, args.abandoned_after / 3) => return Err(error),
    };
    let mut sent = HashMap::new();
    for (input, (_, manifest)) in args.inputs.iter().zip(&inputs) {
        if let Some(manifest) = manifest
            && args.outputs.iter().any(|output| is_in_place(input, output))
        {
            sent.insert(input.name.clone(), manifest.clone());
        }
    }
    Ok((inputs.into_iter().map(|(artifact, _)| artifact).collect(), sent, Some(build)))
}

async fn upload(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    build: BuildId,
) -> anyhow::Result<Vec<(ArtifactId, Option<Arc<Manifest>>)>> {
    let uploader = Uploader { connection, ui, scan: &args.scan, build: Some(build), progress: ui.progress() };
    let targets: Vec<&Path> = args.outputs.iter().filter_map(|output| output.directory.as_deref()).collect();
    try_join_all(args.inputs.iter().map(async |input| {
        let path = match &input.source {
            Source::Artifact(artifact) => return Ok((*artifact, None)),
            Source::Directory(path) => path,
        };
        let left_out = inside(path, targets.iter().copied());
        for target in &left_out {
            ui.note(&format!(
                "{}: {} is left out, because it is the directory of an output",
                input.name,
                target.display()
            ));
        }
        let (artifact, manifest) = uploader
            .upload(&Directory { name: &input.name, path, left_out })
            .instrument(info_span!(target: "gantry", "upload", service = "gantry", input.name = input.name))
            .await?;
        Ok((artifact, Some(manifest)))
    }))
    .await
}

/// Submits the workload. Without `--network`, the command has no network if no worker has private
/// ones, as those of ordinary users.
async fn submit_in_some_network(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    workload: WorkloadId,
    spec: WorkloadSpec,
) -> anyhow::Result<()> {
    let without = WorkloadSpec { network: Network::None.into(), ..spec.clone() };
    let submitted = submit(connection, workload, spec).await;
    // The refusals of the workers are in the metadata, and so in the description.
    let lacks_private = submitted.as_ref().err().is_some_and(|error| {
        refusal(error).is_some_and(|refused| refused.is(Reason::NoCompatibleWorker))
            && error::describe(error).contains(PRIVATE_NETWORK)
    });
    if args.network.is_some() || args.hermetic || !lacks_private {
        return submitted;
    }
    if submit(connection, workload, without).await.is_err() {
        return submitted;
    }
    ui.note("the command runs without a network, because no worker has private networks; `gantry doctor` says why, and --network none omits this line");
    Ok(())
}

async fn submit(connection: &Connection, workload: WorkloadId, spec: WorkloadSpec) -> anyhow::Result<()> {
    let request = SubmitRequest { workload_id: workload.to_string(), spec: Some(spec) };
    let workloads = connection.workloads();
    let submitted = connection
        .repeat(Service::Scheduler, "cannot submit the workload", async || {
            workloads.clone().submit(request.clone()).await
        })
        .instrument(info_span!(target: "gantry", "submit", service = "gantry"))
        .await
        .map(drop);
    let inputs = request.spec.iter().flat_map(|spec| &spec.inputs).map(|input| &input.artifact_id);
    let named = |refused: &Refused| inputs.clone().find(|id| refused.names(id)).cloned();
    match submitted.as_ref().err().and_then(refusal).and_then(named) {
        Some(input) => why::or_why(connection, &input, submitted).await,
        None => submitted,
    }
}

/// Downloads the outputs that have a directory.
async fn download(
    args: &RunArgs,
    connection: &Connection,
    ui: &Ui,
    followed: &FollowResult,
    sent: &HashMap<String, Arc<Manifest>>,
) -> anyhow::Result<Delivery> {
    let FollowResult { finished, cancel_code, .. } = followed;
    let mut delivery = Delivery::Whole;
    let wanted = args.outputs.iter().filter(|output| output.directory.is_some());
    if finished.outputs.is_empty() {
        if wanted.count() > 0 && finished.failure.is_none() && finished.exit.is_none() {
            ui.warn("nothing is downloaded, because the command was stopped and its outputs are not kept");
        }
        return Ok(delivery);
    }
    let downloader =
        Downloader { connection, ui, replace: args.replace, allow: args.allow, progress: ui.progress() };
    for output in &args.outputs {
        let Some(published) = finished.outputs.iter().find(|published| published.name == output.name) else {
            continue;
        };
        let PublishedOutput { name, artifact_id, entries, .. } = published;
        if *entries == 0 {
            ui.note(&format!("{name}: the output is empty"));
        }
        let Some(directory) = &output.directory else {
            ui.note(&format!("{name}: kept as artifact {artifact_id}"));
            continue;
        };
        // The process may have ended before its work was complete.
        if cancel_code.is_some() {
            let how = download_hint(name, artifact_id, directory, sent);
            ui.note(&format!("{name}: not downloaded, because the command was interrupted; {how}"));
            continue;
        }
        if args.replace
            && !sent.contains_key(name)
            && finished.outcome() != Outcome::Succeeded
            && directory.exists()
        {
            let how = download_hint(name, artifact_id, directory, sent);
            let directory = directory.display();
            ui.warn(&format!("{name}: {directory} is not replaced, because the command failed; {how}"));
            continue;
        }
        let artifact =
            artifact_id.parse().context("the scheduler named an output with an invalid artifact id")?;
        let downloaded = downloader
            .download(artifact, name, directory, sent.get(name))
            .instrument(info_span!(target: "gantry", "download", service = "gantry", output.name = name))
            .await
            .inspect_err(|_| {
                ui.warn(&format!(
                    "{name}: kept as artifact {artifact_id}; {}",
                    download_hint(name, artifact_id, directory, sent)
                ));
            })?;
        if downloaded.has_conflicts {
            delivery = Delivery::WithConflicts;
        }
    }
    Ok(delivery)
}

/// Describes how to download an output later. An output in place goes into another directory,
/// because a later download would overwrite changes.
fn download_hint(
    name: &str,
    artifact: &str,
    directory: &Path,
    sent: &HashMap<String, Arc<Manifest>>,
) -> String {
    let target = match directory.file_name() {
        _ if !sent.contains_key(name) => directory.display().to_string(),
        Some(_) => format!("{}.gantry-result", directory.display()),
        None => format!("{name}.gantry-result"),
    };
    format!("download it with `gantry download {artifact} {}`", hint::shell(OsStr::new(&target)))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use clap::Parser;
    use rpc::pb::scheduler::{Network, OutputMode, Privilege, StdinMode, WorkloadKind};

    use super::*;
    use crate::cli::args::{Cli, Command};

    fn parse(arguments: &[&str]) -> RunArgs {
        let arguments = ["gantry", "run"].iter().chain(arguments);
        match Cli::try_parse_from(arguments).expect("parses").command {
            Command::Run(args) => *args,
            _ => panic!("not a run"),
        }
    }

    fn quiet() -> Ui {
        let cli = Cli::try_parse_from(["gantry", "--quiet", "version"]).expect("parses");
        Ui::new(cli.global.quiet)
    }

    #[test]
    fn options_after_command_belong_to_command() {
        let args =
            parse(&["-i", "src=.", "-o", "out", "--memory", "1G", "sh", "-c", "true", "--memory", "2G"]);
        assert_eq!(args.command, ["sh", "-c", "true", "--memory", "2G"].map(OsString::from));
        assert_eq!(args.memory, Some(1 << 30));
        assert_eq!(parse(&["--", "-x"]).command, [OsString::from("-x")]);
        assert!(Cli::try_parse_from(["gantry", "run", "--no-such-flag", "true"]).is_err());
    }

    #[test]
    fn stdin_file_becomes_inline_input() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("in");
        let spec_of = |bytes: usize| {
            std::fs::write(&path, vec![b'x'; bytes]).expect("written");
            let file = path.to_str().expect("text");
            let args = parse(&["--kind", "check", "--stdin-file", file, "--keep-result", "cat"]);
            assert!(!forwards_stdin(&args));
            spec(&args, "main", &quiet())
        };
        for bytes in [0, rpc::spec::MAX_STDIN_BYTES] {
            let spec = spec_of(bytes).expect("valid");
            assert_eq!((spec.stdin(), spec.inline_stdin.len()), (StdinMode::Inline, bytes));
            assert_eq!((spec.kind(), spec.keep_result), (WorkloadKind::Check, true));
            assert!(rpc::spec::parse(spec).is_ok());
        }
        let error = spec_of(rpc::spec::MAX_STDIN_BYTES + 1).expect_err("too large");
        assert!(error.to_string().contains("larger than 1 MiB"), "{error}");
        let missing = parse(&["--stdin-file", "/no/such/file", "cat"]);
        assert!(spec(&missing, "main", &quiet()).is_err());
    }

    #[test]
    fn spec_matches_options() {
        let args = parse(&[
            "--privileged",
            "--network",
            "none",
            "--cpu",
            "1.5",
            "--timeout",
            "2m",
            "-d",
            "--",
            "true",
        ]);
        let spec = spec(&args, "main", &quiet()).expect("valid");
        assert_eq!(spec.privilege(), Privilege::Privileged);
        assert_eq!(spec.network(), Network::None);
        assert_eq!((spec.stdin(), spec.output()), (StdinMode::None, OutputMode::Spooled));
        assert_eq!(spec.limits.map(|limits| limits.cpu_millis), Some(1500));
        assert_eq!(spec.run_timeout, Some(rpc::duration(Duration::from_secs(120))));
        assert_eq!(spec.terminal, None);
        assert!(rpc::spec::parse(spec).is_ok());
        let terminal = super::spec::spec(&parse(&["-t", "true"]), "main", &quiet()).expect("valid").terminal;
        assert!(terminal.is_some_and(|size| size.rows > 0 && size.columns > 0));
    }
}
