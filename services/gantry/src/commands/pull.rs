//! `gantry pull`: makes an artifact of an image.

use anyhow::bail;
use serde_json::json;

use crate::cli::args::PullArgs;
use crate::cli::values::ImageArg;
use crate::client::connect::Connection;
use crate::render::stdout::{print, print_json};
use crate::render::ui::Ui;
use crate::transfer::images::{bring_file, pull as pull_reference};

/// Executes `gantry pull`.
pub(crate) async fn pull(
    connection: &Connection,
    ui: &Ui,
    args: &PullArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let platform = args.platform.as_ref();
    match &args.image {
        ImageArg::Known(_) => bail!("name an image in a registry or on this machine, such as alpine:3.20"),
        ImageArg::File(file) => {
            let artifact = bring_file(connection, ui, file, platform).await?;
            match as_json {
                true => print_json(&json!({ "artifact_id": artifact.to_string() })),
                false => print(&format!("{artifact}\n")),
            }
        }
        ImageArg::Registry(reference) => {
            let pulled = pull_reference(connection, ui, reference, platform).await?;
            match as_json {
                true => print_json(&json!({
                    "reference": pulled.reference,
                    "digest": pulled.digest,
                    "artifact_id": pulled.artifact_id,
                    "existed": pulled.existed,
                })),
                false => print(&format!("{}\n", pulled.artifact_id)),
            }
        }
    }
}
