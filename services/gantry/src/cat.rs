//! `gantry cat`: one file of an artifact, to standard output.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Component, Path};

use anyhow::{Context, bail};
use base64::engine::general_purpose::STANDARD;
use base64::write::EncoderWriter;
use rpc::pb::runtime::ReadFileRequest;
use rpc::pb::streamer::{DownloadResponse, GoTo};
use serde_json::json;
use tokio::sync::mpsc;

use crate::args::CatArgs;
use crate::connect::Connection;
use crate::download::locate;
use crate::error::{Interrupted, Refused};
use crate::exit;
use crate::stdout::write_all;

/// Prints the bytes; as JSON, one object with all of them in base64.
pub(crate) async fn cat(args: &CatArgs, connection: &Connection, as_json: bool) -> anyhow::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let CatArgs { artifact, path } = args;
    let path = Path::new(path);
    let doing = || format!("cannot read {} of artifact {artifact}", path.display());
    let within = within(path).with_context(doing)?;
    let printed = print(*artifact, within.as_os_str().as_bytes(), connection, as_json).await;
    printed.with_context(doing)
}

/// The path as the artifact knows it: no slash at its beginning, though people like to write one.
fn within(path: &Path) -> anyhow::Result<&Path> {
    if path.components().any(|component| component == Component::ParentDir) {
        bail!("paths are seen from the root of the artifact, and there is no way out of it; leave out ..");
    }
    let root = path.components().find(|component| matches!(component, Component::Normal(_))).is_none();
    if root {
        bail!("that is the root of the artifact, which is a directory; name a file in it");
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

async fn print(
    artifact: domain::ArtifactId,
    path: &[u8],
    connection: &Connection,
    as_json: bool,
) -> anyhow::Result<()> {
    let DownloadResponse { go_to, .. } = locate(connection, artifact, &[]).await?;
    let GoTo { gateway_endpoint, ticket, .. } = go_to.context("the streamer named no worker")?;
    let request = ReadFileRequest { ticket, path: bytes::Bytes::copy_from_slice(path) };
    let mut pieces = connection
        .volumes_at(&gateway_endpoint)?
        .read_file(request)
        .await
        .map_err(Refused::from)?
        .into_inner();
    let first = pieces.message().await.map_err(Refused::from)?.ok_or_else(Refused::cut)?;
    let size = first.size_bytes;

    let (sender, queue) = mpsc::channel::<bytes::Bytes>(8);
    let file = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let about = as_json.then(|| {
        let path = String::from_utf8_lossy(path);
        json!({ "artifact_id": artifact.to_string(), "path": path, "size_bytes": size }).to_string()
    });
    let writing = tokio::task::spawn_blocking(move || match about {
        Some(about) => write_document(file, &about, queue),
        None => write_bytes(file, queue),
    });
    let mut received = 0;
    let mut next = Some(first);
    while let Some(piece) = next {
        received += piece.data.len() as u64;
        if sender.send(piece.data).await.is_err() {
            break;
        }
        next = pieces.message().await.map_err(Refused::from)?;
    }
    drop(sender);
    match writing.await.context("writing ended unexpectedly")? {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
            return Err(Interrupted(exit::PIPE).into());
        }
        result => result.context("cannot write to standard output")?,
    }
    if received < size {
        return Err(Refused::cut().into());
    }
    Ok(())
}

fn write_bytes(mut file: File, mut pieces: mpsc::Receiver<bytes::Bytes>) -> io::Result<()> {
    while let Some(data) = pieces.blocking_recv() {
        write_all(&mut file, &data)?;
    }
    Ok(())
}

/// `about` is an object; the content is put behind its last member.
fn write_document(mut file: File, about: &str, mut pieces: mpsc::Receiver<bytes::Bytes>) -> io::Result<()> {
    let about = about.strip_suffix('}').unwrap_or(about);
    write_all(&mut file, format!("{about},\"data\":\"").as_bytes())?;
    let mut encoded = EncoderWriter::new(Patient(&mut file), &STANDARD);
    while let Some(data) = pieces.blocking_recv() {
        io::Write::write_all(&mut encoded, &data)?;
    }
    encoded.finish()?;
    drop(encoded);
    write_all(&mut file, b"\"}\n")
}

/// Writes as [`write_all`] does.
struct Patient<'a>(&'a mut File);

impl io::Write for Patient<'_> {
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
    fn paths_are_seen_from_the_root_of_the_artifact() {
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
    fn a_document_has_all_bytes() {
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
