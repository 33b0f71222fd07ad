//! Images for workloads: pulled by the cluster, or uploaded from this machine.

use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use domain::ArtifactId;
use domain::workload::Image;
use futures::TryStreamExt;
use images::{DockerConfig, ImageSource, LayerStore, Platform};
use rpc::pb::artifacts::ResourceCache;
use rpc::pb::streamer::pull_response::Message;
use rpc::pb::streamer::{PullPhase, PullRequest, Pulled, RegistryCredentials};

use crate::cli::args::ScanArgs;
use crate::cli::values::{ImageArg, ImageFile, ImageFormat};
use crate::client::connect::{Connection, Service};
use crate::client::queries;
use crate::ending::error::Refused;
use crate::render::table::duration;
use crate::render::ui::Ui;
use crate::transfer::upload::Uploader;

/// Returns the artifact of an image, which is pulled or uploaded if the cluster lacks it. `None`:
/// the image needs no artifact of its own.
pub(crate) async fn bring(
    connection: &Connection,
    ui: &Ui,
    image: &ImageArg,
    platform: Option<&Platform>,
) -> anyhow::Result<Option<ArtifactId>> {
    match image {
        ImageArg::Known(Image::Reference(reference)) | ImageArg::Registry(reference) => {
            let pulled = pull(connection, ui, reference, platform).await?;
            let artifact = pulled.artifact_id.parse().context("the streamer named an invalid artifact id")?;
            Ok(Some(artifact))
        }
        ImageArg::Known(_) => Ok(None),
        ImageArg::File(file) => bring_file(connection, ui, file, platform).await.map(Some),
    }
}

/// Has the cluster pull an image.
pub(crate) async fn pull(
    connection: &Connection,
    ui: &Ui,
    reference: &str,
    platform: Option<&Platform>,
) -> anyhow::Result<Pulled> {
    let started = Instant::now();
    let credentials = credentials(reference).await?;
    let mut request = PullRequest {
        team: connection.team.clone(),
        reference: reference.to_owned(),
        platform: platform.map(Platform::to_string).unwrap_or_default(),
        credentials,
        user: None,
    };
    let mut outage = connection.patience.of_call();
    loop {
        match follow(connection, ui, &request).await {
            Ok((pulled, bytes)) => {
                if !pulled.existed {
                    let (digest, took) = (short(&pulled.digest), duration(started.elapsed()));
                    let bytes = crate::render::table::bytes(bytes);
                    ui.step(&format!("{reference}: pulled {digest}, {bytes} in {took}"));
                }
                ui.event(
                    "pulled",
                    serde_json::json!({
                        "reference": pulled.reference,
                        "digest": pulled.digest,
                        "artifact_id": pulled.artifact_id,
                        "existed": pulled.existed,
                    }),
                );
                return Ok(pulled);
            }
            // The streamer has retried with the registry.
            Err(refused) if refused.is(rpc::Reason::RegistryUnavailable) => {
                let Some(image) = last_known(connection, &request.reference).await? else {
                    return Err(anyhow::Error::from(refused).context(format!("cannot pull {reference}")));
                };
                let (_, digest) = image.split_once('@').unwrap_or_default();
                let digest = short(digest);
                ui.warn(&format!("{reference}: {}; using {digest}, which the cluster has", refused.cause()));
                request.reference = image;
            }
            Err(refused) if refused.may_pass() && outage.goes_on(None) => {
                connection.wait_out(&mut outage, &refused).await;
            }
            Err(refused) => {
                return Err(anyhow::Error::from(refused).context(format!("cannot pull {reference}")));
            }
        }
    }
}

/// Returns the complete reference of the image that a tag named when it was used last. `None`: the
/// cluster has none, or the reference has a digest.
async fn last_known(connection: &Connection, reference: &str) -> anyhow::Result<Option<String>> {
    let tag = images::parse_reference(reference, images::DEFAULT_REGISTRY)?.to_string();
    let of_tag = |image: &ResourceCache| {
        let name = image.version.split_once('@').map(|(name, _)| name);
        !image.artifact_id.is_empty() && name == Some(&tag)
    };
    let known = queries::images(connection).try_filter(|image| std::future::ready(of_tag(image)));
    let known: Vec<_> = known.try_collect().await?;
    let newest = known.into_iter().max_by_key(|image| image.last_used_at.map(|at| (at.seconds, at.nanos)));
    Ok(newest.map(|image| image.version))
}

/// Follows a pull, and returns its result and the bytes of its layers that were not in the cluster.
async fn follow(connection: &Connection, ui: &Ui, request: &PullRequest) -> Result<(Pulled, u64), Refused> {
    let by_streamer = |status| connection.refused_by(Service::Streamer, status);
    let mut answers = connection.images().pull(request.clone()).await.map_err(by_streamer)?.into_inner();
    let mut phase = PullPhase::Unspecified;
    let progress = ui.progress();
    let bar = progress.bar(verb(phase), &request.reference);
    let mut layers = 0;
    while let Some(answer) = answers.message().await.map_err(by_streamer)? {
        match answer.message {
            Some(Message::Progress(now)) => {
                if now.phase() != phase {
                    phase = now.phase();
                    bar.doing(verb(phase));
                }
                bar.expect(now.bytes_total);
                bar.reach(now.bytes_done);
                if phase == PullPhase::Fetching {
                    layers = now.bytes_total.saturating_sub(now.bytes_saved);
                }
            }
            Some(Message::Pulled(pulled)) => return Ok((pulled, layers)),
            None => {}
        }
    }
    Err(Refused::cut())
}

fn verb(phase: PullPhase) -> &'static str {
    match phase {
        PullPhase::Unspecified | PullPhase::Resolving => "looking up",
        PullPhase::Fetching => "pulling",
        PullPhase::Writing => "unpacking",
        PullPhase::OtherStreamer => "waiting for",
    }
}

/// Returns the first digits of a digest.
pub(crate) fn short(digest: &str) -> &str {
    digest.get(..19).unwrap_or(digest)
}

/// Reads the credentials for the registry of a reference from the Docker configuration.
async fn credentials(reference: &str) -> anyhow::Result<Option<RegistryCredentials>> {
    let parsed = images::parse_reference(reference, images::DEFAULT_REGISTRY)?;
    let registry = parsed.registry().to_owned();
    let read = tokio::task::spawn_blocking(move || DockerConfig::OfUser.credentials(&registry)).await;
    let credentials = read.context("the credentials could not be read")??;
    Ok(credentials.map(|found| RegistryCredentials { username: found.username, password: found.password }))
}

/// Uploads an image of this machine, unless the cluster has it.
pub(crate) async fn bring_file(
    connection: &Connection,
    ui: &Ui,
    file: &ImageFile,
    platform: Option<&Platform>,
) -> anyhow::Result<ArtifactId> {
    let platform = platform.cloned().unwrap_or_else(Platform::of_this_machine);
    let (opened, of_image) = (file.clone(), platform.clone());
    let source = tokio::task::spawn_blocking(move || open(&opened, &of_image)).await;
    let source = source.context("the image could not be read")??;
    let layers = tempfile::tempdir().context("cannot create a directory for the layers")?;
    let store = LayerStore::new(layers.path().to_owned(), u64::MAX);
    let tree = images::pull(&source, &platform, &store, &images::Progress::default()).await?;
    let progress = ui.progress();
    let uploader = Uploader { connection, ui, scan: &ScanArgs::default(), build: None, progress };
    let name = file.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    uploader.upload_image(&name, Arc::new(tree)).await
}

fn open(file: &ImageFile, platform: &Platform) -> Result<ImageSource, images::ImageError> {
    let name = file.name.as_deref();
    match file.format {
        ImageFormat::Oci => ImageSource::in_layout(&file.path, name, platform),
        ImageFormat::OciArchive => ImageSource::in_layout_archive(&file.path, name, platform),
        ImageFormat::DockerArchive => ImageSource::in_docker_archive(&file.path, name),
    }
}
