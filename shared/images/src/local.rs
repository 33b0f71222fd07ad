//! Images in files on this machine: OCI layouts, archives of them, and archives of `docker save`.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, stream};
use oci_client::manifest::{ImageIndexEntry, OciDescriptor, OciImageIndex, OciImageManifest, OciManifest};
use serde::Deserialize;

use crate::found::{ByteStream, Found, MAX_CONFIG_BYTES, check_digest};
use crate::platform::names;
use crate::registry::{image_manifest, parse_manifest};
use crate::{ImageError, Platform};

/// Bytes of a piece of a blob.
const PIECE_BYTES: usize = 1 << 20;
/// Annotation with the name of an image in a layout.
const NAME: &str = "org.opencontainers.image.ref.name";

/// Blobs in files.
#[derive(Debug)]
pub(crate) struct Blobs {
    files: Files,
    /// Names of the blobs of an archive of `docker save`, by digest. Other blobs are at
    /// `blobs/sha256/HEX`.
    named: HashMap<String, String>,
}

#[derive(Debug)]
enum Files {
    Directory(PathBuf),
    Archive { path: PathBuf, file: Arc<File>, members: HashMap<String, Range> },
}

/// A part of a file.
#[derive(Debug, Clone, Copy)]
struct Range {
    offset: u64,
    length: u64,
}

/// Opens an image in an OCI layout, which is a directory. Blocks.
pub(crate) fn open_layout(
    directory: &Path,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Found<Blobs>, ImageError> {
    layout(Files::Directory(directory.to_owned()), directory, name, platform)
}

/// Opens an image in a tar archive of an OCI layout. Blocks.
pub(crate) fn open_layout_archive(
    file: &Path,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Found<Blobs>, ImageError> {
    layout(Files::archive(file)?, file, name, platform)
}

/// Opens an image in an archive of `docker save`. Blocks.
pub(crate) fn open_docker_archive(file: &Path, name: Option<&str>) -> Result<Found<Blobs>, ImageError> {
    let image = title(file, name);
    let invalid = |cause: &str| ImageError::invalid(&image, cause);
    let files = Files::archive(file)?;
    let text = files.read(&image, "manifest.json")?;
    let saved: Vec<SavedImage> =
        serde_json::from_slice(&text).map_err(|_| invalid("its manifest.json is malformed"))?;
    let all = || saved.iter().flat_map(|saved| saved.repo_tags.iter().flatten()).cloned().collect();
    let is_named = |saved: &&SavedImage, name: &str| {
        let tags = saved.repo_tags.iter().flatten();
        tags.into_iter().any(|tag| tag == name || *tag == format!("{name}:latest"))
    };
    let chosen = match name {
        Some(name) => saved.iter().find(|saved| is_named(saved, name)),
        None if saved.len() == 1 => saved.first(),
        None => None,
    };
    let chosen = chosen.ok_or_else(|| not_found(&image, name, all()))?;
    let text = files.read(&image, &chosen.config)?;
    let config: SavedConfig =
        serde_json::from_slice(&text).map_err(|_| invalid("its configuration is malformed"))?;
    if config.rootfs.diff_ids.len() != chosen.layers.len() {
        return Err(invalid("its configuration and its manifest.json have different numbers of layers"));
    }
    let digest = digest_of(&text);
    let mut named: HashMap<_, _> =
        config.rootfs.diff_ids.iter().cloned().zip(chosen.layers.iter().cloned()).collect();
    named.insert(digest.clone(), chosen.config.clone());
    let descriptor = |digest: &String, name: &str| {
        let size = files.range(name).map_or(0, |range| range.length);
        OciDescriptor {
            digest: digest.clone(),
            size: i64::try_from(size).unwrap_or(0),
            ..OciDescriptor::default()
        }
    };
    let layers = config.rootfs.diff_ids.iter().zip(&chosen.layers);
    let manifest = OciImageManifest {
        layers: layers.map(|(digest, name)| descriptor(digest, name)).collect(),
        config: descriptor(&digest, &chosen.config),
        ..OciImageManifest::default()
    };
    Ok(Found { name: image, digest, manifest, blobs: Blobs { files, named } })
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct SavedConfig {
    rootfs: SavedLayers,
}

#[derive(Debug, Deserialize)]
struct SavedLayers {
    diff_ids: Vec<String>,
}

fn layout(
    files: Files,
    path: &Path,
    name: Option<&str>,
    platform: &Platform,
) -> Result<Found<Blobs>, ImageError> {
    let image = title(path, name);
    let text = files.read(&image, "index.json")?;
    let index: OciImageIndex = serde_json::from_slice(&text)
        .map_err(|_| ImageError::invalid(&image, "its index.json is malformed"))?;
    let name_of = |entry: &ImageIndexEntry| entry.annotations.as_ref().and_then(|all| all.get(NAME).cloned());
    let chosen = match name {
        Some(name) => index
            .manifests
            .iter()
            .find(|entry| entry.digest == name || name_of(entry).is_some_and(|it| it == name)),
        None if index.manifests.len() == 1 => index.manifests.first(),
        None => None,
    };
    let all = || index.manifests.iter().filter_map(name_of).collect();
    let digest = chosen.ok_or_else(|| not_found(&image, name, all()))?.digest.clone();
    let blobs = Blobs { files, named: HashMap::new() };
    let manifest = match parse_manifest(&image, &blobs.manifest(&image, &digest)?)? {
        OciManifest::Image(manifest) => manifest,
        OciManifest::ImageIndex(index) => {
            let part = platform.choose(&index.manifests).ok_or_else(|| ImageError::Platform {
                image: image.clone(),
                wanted: platform.clone(),
                available: names(&index.manifests),
            })?;
            image_manifest(&image, &blobs.manifest(&image, &part.digest)?)?
        }
    };
    Ok(Found { name: image, digest, manifest, blobs })
}

/// Returns the name of an image in messages.
fn title(path: &Path, name: Option<&str>) -> String {
    name.map_or_else(|| path.display().to_string(), |name| format!("{}:{name}", path.display()))
}

fn not_found(image: &str, name: Option<&str>, mut all: Vec<String>) -> ImageError {
    all.truncate(20);
    let all =
        if all.is_empty() { "it names no images".to_owned() } else { format!("it has {}", all.join(", ")) };
    ImageError::NotFound(match name {
        Some(_) => format!("{image}: {all}"),
        None => format!("{image} without a name: {all}"),
    })
}

fn digest_of(bytes: &[u8]) -> String {
    use sha2::Digest as _;
    format!("sha256:{}", hex::encode(sha2::Sha256::digest(bytes)))
}

impl Blobs {
    fn member(&self, digest: &str) -> String {
        let standard = || format!("blobs/{}", digest.replacen(':', "/", 1));
        self.named.get(digest).cloned().unwrap_or_else(standard)
    }

    fn manifest(&self, image: &str, digest: &str) -> Result<Vec<u8>, ImageError> {
        if !digest.starts_with("sha256:") || digest.contains('/') {
            return Err(ImageError::invalid(image, format!("it has the unsupported digest {digest:?}")));
        }
        let text = self.files.read(image, &self.member(digest))?;
        check_digest(image, "manifest", &text, digest)?;
        Ok(text)
    }

    /// Streams a blob.
    pub(crate) fn blob(&self, digest: &str) -> ByteStream<'static> {
        let member = self.member(digest);
        let opened = self.files.open(&member);
        let path = self.files.path().join(&member);
        let pieces = stream::try_unfold((opened, path), async |(opened, path)| {
            let failed = |source| ImageError::File { path: path.clone(), source };
            let (file, range) = opened.map_err(failed)?;
            if range.length == 0 {
                return Ok(None);
            }
            let length = range.length.min(PIECE_BYTES as u64);
            let reader = file.clone();
            let read = tokio::task::spawn_blocking(move || {
                let mut piece = vec![0; length as usize]; // At most PIECE_BYTES.
                reader.read_exact_at(&mut piece, range.offset)?;
                Ok(Bytes::from(piece))
            });
            let piece = read.await.map_err(io::Error::other).and_then(|read| read).map_err(failed)?;
            let rest = Range { offset: range.offset + length, length: range.length - length };
            Ok(Some((piece, (Ok((file, rest)), path))))
        });
        pieces.boxed()
    }
}

impl Files {
    /// Lists the members of a tar archive.
    fn archive(path: &Path) -> Result<Self, ImageError> {
        let list = || {
            let file = Arc::new(File::open(path)?);
            let mut archive = tar::Archive::new(&*file);
            let (mut members, mut links) = (HashMap::new(), Vec::new());
            for member in archive.entries_with_seek()? {
                let member = member?;
                let name = normal(&member.path()?);
                if let Some(target) = member.link_name()? {
                    let base = Path::new(&name).parent().unwrap_or(Path::new("")).join(target);
                    links.push((name, normal(&base)));
                } else {
                    members.insert(name, Range { offset: member.raw_file_position(), length: member.size() });
                }
            }
            for (name, target) in links {
                if let Some(range) = members.get(&target).copied() {
                    members.insert(name, range);
                }
            }
            Ok(Self::Archive { path: path.to_owned(), file, members })
        };
        list().map_err(|source| ImageError::File { path: path.to_owned(), source })
    }

    fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::Archive { path, .. } => path,
        }
    }

    fn range(&self, member: &str) -> io::Result<Range> {
        match self {
            Self::Directory(directory) => {
                let length = std::fs::metadata(directory.join(member))?.len();
                Ok(Range { offset: 0, length })
            }
            Self::Archive { members, .. } => {
                members.get(&normal(Path::new(member))).copied().ok_or_else(|| io::ErrorKind::NotFound.into())
            }
        }
    }

    fn open(&self, member: &str) -> io::Result<(Arc<File>, Range)> {
        let range = self.range(member)?;
        let file = match self {
            Self::Directory(directory) => Arc::new(File::open(directory.join(member))?),
            Self::Archive { file, .. } => file.clone(),
        };
        Ok((file, range))
    }

    /// Reads a small file.
    fn read(&self, image: &str, member: &str) -> Result<Vec<u8>, ImageError> {
        let failed = |source| ImageError::File { path: self.path().join(member), source };
        let (file, range) = self.open(member).map_err(failed)?;
        if range.length > MAX_CONFIG_BYTES {
            return Err(ImageError::invalid(image, format!("{member} has {} bytes", range.length)));
        }
        let mut text = vec![0; range.length as usize]; // At most MAX_CONFIG_BYTES.
        file.read_exact_at(&mut text, range.offset).map_err(failed)?;
        Ok(text)
    }
}

/// Returns a path without `.` and `..`.
fn normal(path: &Path) -> String {
    use std::path::Component;
    let mut parts: Vec<String> = Vec::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => parts.push(name.to_string_lossy().into_owned()),
            Component::ParentDir => _ = parts.pop(),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    parts.join("/")
}
