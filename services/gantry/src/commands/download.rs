//! `gantry download`: downloads an artifact into a directory.

use crate::cli::args::DownloadArgs;
use crate::client::connect::Connection;
use crate::client::references::artifact_id;
use crate::render::stdout::print_json;
use crate::render::ui::Ui;
use crate::transfer::download::Downloader;

/// Executes `gantry download`.
pub(crate) async fn download(
    connection: &Connection,
    ui: &Ui,
    args: &DownloadArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let progress = ui.progress();
    let downloader = Downloader { connection, ui, replace: args.replace, allow: args.allow, progress };
    let artifact = artifact_id(connection, "download", &args.artifact).await?;
    let downloaded = downloader.download(artifact, &artifact.to_string(), &args.directory, None).await?;
    if as_json { print_json(&downloaded.details) } else { Ok(()) }
}
