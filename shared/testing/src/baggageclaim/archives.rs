//! Archives, made and unpacked by the host's `tar`.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

/// Compresses with the host's programs, and with a library where the host has none.
pub(super) fn encode(encoding: &str, tar: Vec<u8>) -> Option<Vec<u8>> {
    match encoding {
        "raw" => Some(tar),
        "gzip" => filter(Command::new("gzip").arg("-c"), &tar).ok(),
        "zstd" => zstd::encode_all(&tar[..], 0).ok(),
        "s2" => {
            let mut writer = minlz::Writer::new(Vec::new());
            writer.write_all(&tar).ok()?;
            writer.flush().ok()?;
            Some(writer.get_ref().clone())
        }
        _ => None,
    }
}

/// What can be decoded, and whether that was all.
fn decode(encoding: &str, body: &[u8]) -> Option<(Vec<u8>, bool)> {
    let mut tar = Vec::new();
    let whole = match encoding {
        "raw" => {
            tar.extend_from_slice(body);
            true
        }
        "gzip" => match filter(Command::new("gzip").arg("-dc"), body) {
            Ok(out) => {
                tar = out;
                true
            }
            Err(out) => {
                tar = out;
                false
            }
        },
        "zstd" => zstd::Decoder::new(body).ok()?.read_to_end(&mut tar).is_ok(),
        "s2" => minlz::Reader::new(body).read_to_end(&mut tar).is_ok(),
        _ => return None,
    };
    Some((tar, whole))
}

/// Unpacks what there is, and says whether it was an archive.
pub(super) fn unpack(encoding: &str, body: &[u8], into: &Path) -> bool {
    let Some((tar, whole)) = decode(encoding, body) else { return false };
    let unpacked = filter(Command::new("tar").args(["-x", "-C"]).arg(into), &tar).is_ok();
    // GNU tar takes nothing at all for an empty archive, where it is a plain one; the worker's does not.
    whole && unpacked && !tar.is_empty()
}

/// An archive of a directory's contents, or of one file, and whether all of it could be read.
pub(super) fn pack(path: &Path) -> (Vec<u8>, bool) {
    let mut tar = Command::new("tar");
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !path.is_dir() => tar.arg("-c").arg("-C").arg(parent).arg(name),
        _ => tar.args(["-c", "-C"]).arg(path).arg("."),
    };
    match filter(&mut tar, &[]) {
        Ok(bytes) => (bytes, true),
        Err(bytes) => (bytes, false),
    }
}

/// The output of a program; as an error when it failed.
fn filter(program: &mut Command, input: &[u8]) -> Result<Vec<u8>, Vec<u8>> {
    let program = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = program.spawn().expect("tar and gzip are installed");
    let mut stdin = child.stdin.take().expect("a pipe");
    std::thread::scope(|scope| {
        // It may have seen enough before it has read everything.
        scope.spawn(move || _ = stdin.write_all(input));
        let output = child.wait_with_output().expect("output");
        if output.status.success() { Ok(output.stdout) } else { Err(output.stdout) }
    })
}
