//! Options of `gantry upload`, `download` and `cat`, and the options that they share with `run`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use crate::cli::values::{self, CopySource, ImageArg};

/// Rules for scanning a directory before an upload.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ScanArgs {
    /// Also leave out files that git ignores: .gitignore, .git/info/exclude and core.excludesFile
    ///
    /// Files that git tracks are still uploaded, and so are files that a .gantryignore includes
    /// with `!`.
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) gitignore: bool,
    /// Leave out unreadable files instead of failing, and accept files that change during the
    /// upload
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_changed: bool,
}

/// Rules for writing a result into a directory of the caller.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct AllowArgs {
    /// Also write files that make git run programs, such as .git/hooks and .git/config
    ///
    /// Without this option, such files are left out and named in a warning.
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_git_hooks: bool,
    /// Also write setuid and setgid bits, file capabilities, device nodes and .gantryignore files
    ///
    /// Without this option, they are left out and named in a warning.
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) preserve_special: bool,
    /// Follow symbolic links in the paths of output directories, and in relative paths of inputs
    /// and traces
    ///
    /// Without this option, such a path is rejected, because an earlier result may have made the
    /// link.
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) follow_links: bool,
}

/// Arguments of `gantry upload`.
#[derive(Debug, Args)]
#[command(after_help = "\
The artifact is kept for 12 hours, unless the artifact store is configured otherwise, and longer while a workload, build or cache uses it. \
If the cluster has the same bytes already, the id of that artifact is printed, and nothing is sent.

Examples:
  artifact=$(gantry upload -q docs)
  gantry run -i docs=artifact:$artifact -- ls docs")]
pub(crate) struct UploadArgs {
    /// Directory to upload
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Label of the artifact. Default: the name of the directory
    ///
    /// An artifact that the cluster has already keeps its label.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// Store the bytes in the database of the artifact store instead of on a worker
    ///
    /// No worker is needed until the artifact is used, and the artifact survives the loss of all
    /// workers. Each upload makes a new artifact. Limits: 1 MiB, and 1000 files, directories and
    /// symbolic links.
    #[arg(long)]
    pub(crate) inline: bool,
    /// Make the artifact the image of the resource type NAME, for all workers and teams
    ///
    /// `gantry run --image resource-type:NAME` then runs in its directory rootfs/, even on workers
    /// that have their own image for that type. The artifact is kept until another upload replaces
    /// it.
    #[arg(long, value_name = "NAME")]
    pub(crate) resource_type: Option<String>,
    /// Version of the resource type's image, shown by `gantry list base-types`
    #[arg(
        long,
        value_name = "TEXT",
        requires = "resource_type",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) type_version: String,
    #[command(flatten)]
    pub(crate) scan: ScanArgs,
}

/// Arguments of `gantry download`.
#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// Id of the artifact, the beginning of its id, or `WORKLOAD:OUTPUT`
    #[arg(value_name = "ARTIFACT", value_parser = values::artifact)]
    pub(crate) artifact: String,
    /// Directory to write into. It is created if it does not exist
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Replace the directory instead of merging into it
    #[arg(long)]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) allow: AllowArgs,
}

/// Arguments of `gantry cat`.
#[derive(Debug, Args)]
pub(crate) struct CatArgs {
    /// Id of the artifact, the beginning of its id, or `WORKLOAD:OUTPUT`
    #[arg(value_name = "ARTIFACT", value_parser = values::artifact)]
    pub(crate) artifact: String,
    /// Path of the file, relative to the root of the artifact. Symbolic links are not followed
    #[arg(value_name = "PATH")]
    pub(crate) path: OsString,
}

/// Arguments of `gantry pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gantry pull alpine:3.20
  gantry pull --platform linux/arm64 ghcr.io/team/app
  gantry pull oci-archive:app.tar")]
pub(crate) struct PullArgs {
    /// Reference, such as `alpine:3.20`, or an image on this machine, as in `gantry run --image`
    #[arg(value_name = "IMAGE", value_parser = values::image)]
    pub(crate) image: ImageArg,
    /// Platform of the image, such as `linux/arm64`. Default: that of the streamer
    #[arg(long, value_name = "PLATFORM", value_parser = values::platform)]
    pub(crate) platform: Option<images::Platform>,
}

/// Arguments of `gantry cp`.
#[derive(Debug, Args)]
#[command(after_help = "\
A whole output is merged into the directory TARGET, as by `gantry download`. A file is written to TARGET, or into TARGET if that is a \
directory. Outputs exist when the workload has ended; before that, use `gantry exec WORKLOAD -- cat PATH`.

Examples:
  gantry cp last:report ./out
  gantry cp build:report/log build.log")]
pub(crate) struct CpArgs {
    /// Output, or file of an output: `WORKLOAD:OUTPUT`, `WORKLOAD:OUTPUT/PATH` or `ARTIFACT:/PATH`
    #[arg(value_name = "SOURCE", value_parser = values::copy_source_parser())]
    pub(crate) source: CopySource,
    /// Directory or file on this machine. `-` prints a file on standard output
    #[arg(value_name = "TARGET")]
    pub(crate) target: PathBuf,
}
