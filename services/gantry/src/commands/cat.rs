//! `gantry cat` and `gantry cp`: one file of an artifact, printed or copied.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, bail};
use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use rpc::pb::runtime::{ReadFileRequest, ReadFileResponse};
use rpc::pb::streamer::{DownloadResponse, TransferEndpoint};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::cli::args::{AllowArgs, CatArgs, CpArgs};
use crate::client::connect::Connection;
use crate::client::references::artifact_id;
use crate::ending::error::{Interrupted, Refused, may_be_read};
use crate::ending::exit_code;
use crate::render::stdout::{print_json, write_all};
use crate::render::ui::Ui;
use crate::transfer::download::{Downloader, gateway_of, locate};

/// Executes `gantry cat`. As JSON, prints one object with the bytes in base64.
pub(crate) async fn cat(args: &CatArgs, connection: &Connection, as_json: bool) -> anyhow::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let path = Path::new(&args.path);
    let doing = || format!("cannot read {} of artifact {}", path.display(), args.artifact);
    let within = within(path).with_context(doing)?;
    let artifact = artifact_id(connection, "read", &args.artifact).await?;
    let target = Target::Stdout { as_json };
    let printed = transfer(artifact, within.as_os_str().as_bytes(), connection, &target).await;
    printed.with_context(doing)
}

/// Executes `gantry cp`.
pub(crate) async fn cp(args: &CpArgs, connection: &Connection, ui: &Ui, as_json: bool) -> anyhow::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let CpArgs { source, target } = args;
    let artifact = artifact_id(connection, "copy", &source.artifact).await?;
    let Some(path) = &source.path else {
        let progress = ui.progress();
        let allow = AllowArgs::default();
        let downloader = Downloader { connection, ui, replace: false, allow, progress };
        let downloaded = downloader.download(artifact, &source.artifact, target, None).await?;
        return if as_json { print_json(&downloaded.details) } else { Ok(()) };
    };
    let path = within(path)?;
    if target == Path::new("-") {
        let copied =
            transfer(artifact, path.as_os_str().as_bytes(), connection, &Target::Stdout { as_json }).await;
        return copied.with_context(|| format!("cannot copy {} of {}", path.display(), source.artifact));
    }
    let target = match path.file_name() {
        Some(name) if target.is_dir() => target.join(name),
        _ => target.clone(),
    };
    let doing = || format!("cannot copy {} of {} to {target:?}", path.display(), source.artifact);
    // A reader of the target never sees a part of the file.
    let mut temporary = target.clone().into_os_string();
    temporary.push(format!(".gantry-{}", domain::TransferId::new()));
    let temporary = PathBuf::from(temporary);
    let copied = transfer(artifact, path.as_os_str().as_bytes(), connection, &Target::File(&temporary)).await;
    let copied = copied.and_then(|()| Ok(std::fs::rename(&temporary, &target)?));
    if copied.is_err() {
        // The file may not exist yet.
        _ = std::fs::remove_file(&temporary);
    }
    copied.with_context(doing)
}

/// Where a file is written.
enum Target<'a> {
    /// Standard output, as bytes or as a JSON document.
    Stdout { as_json: bool },
    /// A new file.
    File(&'a Path),
}

/// Makes a path relative to the root of the artifact.
fn within(path: &Path) -> anyhow::Result<&Path> {
    if path.components().any(|component| component == Component::ParentDir) {
        bail!("the path must not leave the artifact; leave out ..");
    }
    let root = path.components().find(|component| matches!(component, Component::Normal(_))).is_none();
    if root {
        bail!("the path is the root of the artifact, which is a directory; name a file in it");
    }
    let mut components = path.components();
    loop {
        let rest = components.as_path();
        match components.next() {
            Some(Component::Normal(_)) | None => return Ok(rest),
            Some(_) => {}
        }
    }
}

async fn transfer(
    artifact: domain::ArtifactId,
    path: &[u8],
    connection: &Connection,
    target: &Target<'_>,
) -> anyhow::Result<()> {
    let mut transfer =
        FileTransfer { artifact, path, connection, target, avoid: Vec::new(), out: None, received: 0 };
    let mut outage = connection.patience.of_call();
    let mut read = transfer.attempt().await;
    while let Some(refused) = read.as_ref().err().and_then(may_be_read)
        && outage.goes_on(None)
    {
        connection.wait_out(&mut outage, refused).await;
        read = transfer.attempt().await;
    }
    // Standard output may be closed, whether or not the file was read to its end.
    if let Some(out) = transfer.out {
        out.finish().await?;
    }
    read
}

/// Transfer of a file from any gateway that can read it.
struct FileTransfer<'a> {
    artifact: domain::ArtifactId,
    path: &'a [u8],
    connection: &'a Connection,
    target: &'a Target<'a>,
    /// Gateways that were tried.
    avoid: Vec<String>,
    out: Option<Writer>,
    /// Number of received bytes.
    received: u64,
}

impl FileTransfer<'_> {
    /// Continues the transfer, from another gateway if there is one.
    async fn attempt(&mut self) -> anyhow::Result<()> {
        let DownloadResponse { endpoint, .. } = locate(self.connection, self.artifact, &self.avoid).await?;
        let endpoint = endpoint.context("the streamer named no worker")?;
        let by_gateway = |status| Refused::from(status).by(gateway_of(&endpoint));
        let TransferEndpoint { gateway_endpoint, ticket, .. } = endpoint.clone();
        self.avoid.push(gateway_endpoint.clone());
        let request = ReadFileRequest { ticket, path: bytes::Bytes::copy_from_slice(self.path) };
        let mut volumes = self.connection.volumes_at(&gateway_endpoint).await?;
        let mut pieces = volumes.read_file(request).await.map_err(by_gateway)?.into_inner();
        let first = pieces.message().await.map_err(by_gateway)?.ok_or_else(Refused::cut)?;
        let size = first.size_bytes;
        let out = match &mut self.out {
            Some(out) => out,
            none => none.insert(Writer::start(self.artifact, self.path, size, self.target)?),
        };
        if out.size != size {
            bail!("the file on this worker differs from the one on the worker before");
        }

        // The gateway sends the file from its start. The bytes up to here are already printed.
        let mut again = self.received;
        let mut next = Some(first);
        while let Some(ReadFileResponse { mut data, .. }) = next {
            let known = usize::try_from(again).unwrap_or(usize::MAX).min(data.len());
            again -= known as u64;
            let new = data.split_off(known);
            self.received += new.len() as u64;
            if !new.is_empty() && out.pieces.send(new).await.is_err() {
                // The writer has failed, and its result says why.
                return Ok(());
            }
            next = pieces.message().await.map_err(Refused::from)?;
        }
        if self.received < size {
            return Err(Refused::cut().into());
        }
        Ok(())
    }
}

/// Writer of the file to its target.
struct Writer {
    size: u64,
    pieces: mpsc::Sender<bytes::Bytes>,
    writing: JoinHandle<io::Result<()>>,
    /// The target, for messages.
    what: &'static str,
}

impl Writer {
    fn start(
        artifact: domain::ArtifactId,
        path: &[u8],
        size: u64,
        target: &Target<'_>,
    ) -> anyhow::Result<Self> {
        let (pieces, queue) = mpsc::channel::<bytes::Bytes>(8);
        let (file, as_json) = match target {
            Target::Stdout { as_json } => (File::from(io::stdout().as_fd().try_clone_to_owned()?), *as_json),
            Target::File(path) => (File::create_new(path)?, false),
        };
        let about = as_json.then(|| {
            let path = String::from_utf8_lossy(path);
            json!({ "artifact_id": artifact.to_string(), "path": path, "size_bytes": size }).to_string()
        });
        let writing = tokio::task::spawn_blocking(move || match about {
            Some(about) => write_document(file, &about, queue),
            None => write_bytes(file, queue),
        });
        let what = match target {
            Target::Stdout { .. } => "standard output",
            Target::File(_) => "the file",
        };
        Ok(Self { size, pieces, writing, what })
    }

    /// Waits until all received bytes are written.
    async fn finish(self) -> anyhow::Result<()> {
        drop(self.pieces);
        match self.writing.await.context("writing ended unexpectedly")? {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                Err(Interrupted(exit_code::PIPE).into())
            }
            result => result.with_context(|| format!("cannot write to {}", self.what)),
        }
    }
}

fn write_bytes(mut file: File, mut pieces: mpsc::Receiver<bytes::Bytes>) -> io::Result<()> {
    while let Some(data) = pieces.blocking_recv() {
        write_all(&mut file, &data)?;
    }
    Ok(())
}

/// Writes the JSON object `about`, with the content as its last member.
fn write_document(mut file: File, about: &str, mut pieces: mpsc::Receiver<bytes::Bytes>) -> io::Result<()> {
    let about = about.strip_suffix('}').unwrap_or(about);
    write_all(&mut file, format!("{about},\"data\":\"").as_bytes())?;
    let mut encoded = EncoderWriter::new(BlockingWriter(&mut file), &STANDARD);
    while let Some(data) = pieces.blocking_recv() {
        io::Write::write_all(&mut encoded, &data)?;
    }
    encoded.finish()?;
    drop(encoded);
    write_all(&mut file, b"\"}\n")
}

/// Writer that waits as [`write_all`] does.
struct BlockingWriter<'a>(&'a mut File);

impl io::Write for BlockingWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_all(self.0, bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use super::*;

    #[test]
    fn path_is_relative_to_root_of_artifact() {
        let of = |path: &'static str| within(Path::new(path)).map(|path| path.display().to_string());
        assert_eq!(of("a/b").expect("a path"), "a/b");
        assert_eq!(of("/a/b").expect("a path"), "a/b");
        assert_eq!(of("././/a").expect("a path"), "a");
        for root in ["", "/", ".", "./."] {
            assert!(of(root).expect_err("refused").to_string().contains("name a file"), "{root}");
        }
        for out in ["..", "../x", "a/../b"] {
            assert!(of(out).expect_err("refused").to_string().contains("leave out .."), "{out}");
        }
    }

    #[test]
    fn document_has_all_bytes() {
        let mut file = tempfile::tempfile().expect("a file");
        let (sender, queue) = mpsc::channel(4);
        for piece in [&b"\xff\x00"[..], b"\"x", b""] {
            sender.try_send(bytes::Bytes::from_static(piece)).expect("room");
        }
        drop(sender);
        write_document(file.try_clone().expect("another"), "{\"size_bytes\":4}", queue).expect("written");
        let mut text = String::new();
        file.rewind().expect("rewound");
        file.read_to_string(&mut text).expect("text");
        assert_eq!(text, "{\"size_bytes\":4,\"data\":\"/wAieA==\"}\n");
    }
}
