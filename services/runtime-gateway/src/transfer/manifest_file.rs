//! Manifest files, which contain the boot id, the team, and the entries of a tree.
//!
//! Files beside the volumes of this machine are compressed with zstd, because many versions of one
//! tree may be kept.

use std::io::{self, Read};
use std::path::Path;

use domain::VolumeHandle;
use transfer::{InvalidManifest, Limits, Manifest};

/// Suffix of a manifest file that is being written.
pub(super) const PARTIAL_SUFFIX: &str = "tmp";

/// Level of zstd. Digests do not shrink, and all levels shrink the rest to a few bytes.
const LEVEL: i32 = 1;

/// Maximum length of the digest and the boot id with its length.
const HEAD_BYTES: u64 = 32 + 1 + 255;

/// Encodes a manifest file: the tree's digest, the boot id and the team with a length each, and the
/// entries.
pub(super) fn encode(boot: &str, team: &str, manifest: &Manifest) -> io::Result<Vec<u8>> {
    let length = |text: &str| u8::try_from(text.len()).map_err(io::Error::other);
    let (boot_length, team_length) = ([length(boot)?], [length(team)?]);
    let digest = manifest.tree_digest();
    let head = [digest.as_bytes(), &boot_length, boot.as_bytes(), &team_length, team.as_bytes()];
    Ok([&head.concat()[..], &manifest.encode()].concat())
}

pub(super) fn save(path: &Path, boot: &str, team: &str, manifest: &Manifest) -> io::Result<()> {
    let temporary = path.with_extension(PARTIAL_SUFFIX);
    let file = zstd::bulk::compress(&encode(boot, team, manifest)?, LEVEL)?;
    let saved = std::fs::write(&temporary, file).and_then(|()| std::fs::rename(&temporary, path));
    if saved.is_err() {
        // A partial manifest is useless, and uses space on a disk that may be full.
        _ = std::fs::remove_file(&temporary);
    }
    saved
}

/// Loads the manifests of this boot, oldest first. Only the newest ones that fit into `most_bytes`
/// of memory are loaded.
pub(super) fn load_recent(
    directory: &Path,
    boot: &str,
    most_bytes: u64,
) -> io::Result<Vec<(VolumeHandle, String, Manifest)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let Some(volume) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A file that was removed meanwhile is skipped.
        let Ok(metadata) = entry.metadata() else { continue };
        files.push((metadata.modified()?, volume, entry.path()));
    }
    files.sort_unstable_by(|a, b| b.cmp(a));
    let (mut recalled, mut bytes) = (Vec::new(), 0);
    for (_, volume, path) in files {
        if written_in(&path).is_ok_and(|written_in| written_in == boot)
            && let Ok((_, team, manifest)) = load(&path)
        {
            bytes += manifest.encoded_bytes();
            if bytes > most_bytes {
                break;
            }
            recalled.push((volume, team, manifest));
        }
    }
    recalled.reverse();
    Ok(recalled)
}

/// Reads the boot id of a manifest file, without its entries.
fn written_in(path: &Path) -> io::Result<String> {
    let mut head = Vec::new();
    let file = zstd::Decoder::new(std::fs::File::open(path)?)?;
    file.take(HEAD_BYTES).read_to_end(&mut head)?;
    let boot = head.get(32..).and_then(text).map(|(boot, _)| boot);
    boot.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

pub(super) fn load(path: &Path) -> io::Result<(String, String, Manifest)> {
    let file = std::fs::read(path)?;
    // Files of earlier versions are not compressed.
    if !file.starts_with(&zstd::zstd_safe::MAGICNUMBER.to_le_bytes()) {
        return decode(&file);
    }
    // The source is in memory, so only its contents can be wrong.
    let malformed = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    decode(&zstd::decode_all(&file[..]).map_err(malformed)?)
}

/// Splits a text with its length from the bytes that follow.
fn text(rest: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = rest.split_first()?;
    let (text, rest) = rest.split_at_checked(usize::from(*length))?;
    Some((String::from_utf8(text.to_vec()).ok()?, rest))
}

/// Decodes a manifest file into the boot id, the team and the manifest.
pub(super) fn decode(file: &[u8]) -> io::Result<(String, String, Manifest)> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let (digest, rest) = file.split_at_checked(32).ok_or_else(malformed)?;
    let (boot, rest) = text(rest).ok_or_else(malformed)?;
    let (team, entries) = text(rest).ok_or_else(malformed)?;
    let manifest = Manifest::decode(entries, Limits::of_process()).map_err(|error| match error {
        // The file is valid, but there is no memory for it now.
        InvalidManifest::NoMemory => io::Error::new(io::ErrorKind::OutOfMemory, error),
        _ => malformed(),
    })?;
    if manifest.tree_digest().as_bytes() != digest {
        return Err(malformed());
    }
    Ok((boot, team, manifest))
}
