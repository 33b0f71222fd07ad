//! Options of `gantry upload`, `download` and `cat`, and those that they share with `run`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;
use domain::ArtifactId;

/// How directories are scanned.
#[derive(Debug, Clone, Args)]
pub(crate) struct ScanArgs {
    /// Leave out what git ignores, too: by .gitignore, .git/info/exclude and core.excludesFile
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) gitignore: bool,
    /// Go on when files cannot be read (they are left out) or change while they are uploaded
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_changed: bool,
}

/// What of a result is written into a directory of the caller.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct TakeArgs {
    /// Write what makes git run programs, too: .git/hooks, .git/config and the like
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) allow_git_hooks: bool,
    /// Keep setuid and setgid bits, file capabilities, device nodes, and changes of .gantryignore
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) preserve_special: bool,
    /// Follow symbolic links in the paths of results, and in relative ones of inputs and of the trace
    #[arg(long, help_heading = "Inputs and outputs")]
    pub(crate) follow_links: bool,
}

/// `gantry upload`
#[derive(Debug, Args)]
pub(crate) struct UploadArgs {
    /// The directory. What is uploaded is kept for 12 hours (as the artifact store is set), and longer while something owns it
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// A name, for people. Default: that of the directory. Bytes that the cluster has already keep theirs, except with --inline, which makes
    /// another artifact each time
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    pub(crate) label: String,
    /// Have the cluster keep the bytes in its database: no worker is needed until somebody uses them, and none is lost with them. At most 1 MiB,
    /// and 1000 files, directories and symbolic links
    #[arg(long)]
    pub(crate) inline: bool,
    /// Make it the image of a resource type, on all workers and for all teams: `gantry run --image resource-type:NAME` runs in its rootfs/ from
    /// then on, whatever workers bring along, and it is kept until another one takes its place
    #[arg(long, value_name = "NAME")]
    pub(crate) resource_type: Option<String>,
    /// Its version, for people
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

/// `gantry download`
#[derive(Debug, Args)]
pub(crate) struct DownloadArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT")]
    pub(crate) artifact: ArtifactId,
    /// Where to; made where it is missing
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Take the place of the directory, rather than being merged into it
    #[arg(long)]
    pub(crate) replace: bool,
    #[command(flatten)]
    pub(crate) take: TakeArgs,
}

/// `gantry cat`
#[derive(Debug, Args)]
pub(crate) struct CatArgs {
    /// The artifact
    #[arg(value_name = "ARTIFACT")]
    pub(crate) artifact: ArtifactId,
    /// The file, as seen from the root of the artifact. Symbolic links are not followed
    #[arg(value_name = "PATH")]
    pub(crate) path: OsString,
}
