//! `gantry upload`: makes an artifact of a directory, and optionally the image of a resource type.

use std::path::Path;

use domain::ArtifactId;
use rpc::pb::artifacts::PutBaseResourceTypeRequest;
use serde_json::json;

use crate::cli::args::UploadArgs;
use crate::client::connect::{Connection, Service};
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;
use crate::transfer::upload::{Directory, Uploader};

/// Executes `gantry upload`.
pub(crate) async fn upload(
    connection: &Connection,
    ui: &Ui,
    args: &UploadArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let artifact = artifact(connection, ui, args).await?;
    if let Some(name) = &args.resource_type {
        put_type(connection, name, &args.type_version, artifact).await?;
    }
    if as_json {
        print_json(&json!({ "artifact_id": artifact.to_string() }))
    } else {
        print(&format!("{artifact}\n"))
    }
}

/// Uploads the directory, and returns the artifact.
async fn artifact(connection: &Connection, ui: &Ui, args: &UploadArgs) -> anyhow::Result<ArtifactId> {
    let name = args.directory.canonicalize().ok();
    let name = name.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let name = if args.label.is_empty() { name.unwrap_or_default() } else { args.label.clone() };
    let progress = ui.progress();
    let uploader = Uploader { connection, ui, scan: &args.scan, build: None, progress };
    let directory = Directory { name: &name, path: &args.directory, left_out: Vec::new() };
    if args.inline {
        return uploader.upload_inline(&directory).await;
    }
    let artifact = uploader.upload(&directory).await?.0;
    drop(uploader);
    if !args.label.is_empty() {
        let label = crate::client::queries::artifact(connection, &artifact.to_string()).await?.label;
        if label != args.label {
            ui.warn(&format!("the cluster has these bytes already, with the label {label:?}, which stays"));
        }
    }
    Ok(artifact)
}

/// Makes an artifact the image of a resource type on all workers.
async fn put_type(
    connection: &Connection,
    name: &str,
    version: &str,
    artifact: ArtifactId,
) -> anyhow::Result<()> {
    let request = PutBaseResourceTypeRequest {
        team: connection.team.clone(),
        r#type: name.to_owned(),
        version: version.to_owned(),
        worker_id: String::new(),
        artifact_id: artifact.to_string(),
    };
    let client = connection.caches();
    let doing = format!("cannot make artifact {artifact} the image of resource type {name:?}");
    connection
        .repeat(Service::ArtifactStore, &doing, async || {
            client.clone().put_base_resource_type(request.clone()).await
        })
        .await?;
    Ok(())
}
