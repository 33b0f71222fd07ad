//! Small tar archives in memory.

use std::io;

use runtime::Archive;
use tokio::io::AsyncReadExt;

const BLOCK: usize = 512;
/// Bytes that may follow the only file of an archive: padding, and blocks of zeros.
const MAX_REST: u64 = 1 << 20;

/// An archive without entries. A worker rejects an empty stream.
pub(super) fn empty() -> Vec<u8> {
    vec![0; 2 * BLOCK]
}

/// An archive of one file.
pub(super) fn archive_of_file(name: &str, contents: &[u8]) -> Vec<u8> {
    let mut head = [0; BLOCK];
    let mut put = |at: usize, text: &str| head[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(0, name);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{:011o}\0", contents.len()));
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, "0");
    put(257, "ustar\x0000");
    let sum: u32 = head.iter().map(|byte| u32::from(*byte)).sum();
    head[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());

    let mut archive = head.to_vec();
    archive.extend_from_slice(contents);
    archive.resize(archive.len().next_multiple_of(BLOCK), 0);
    archive.extend_from_slice(&empty());
    archive
}

/// Converts an archive into a stream.
pub(super) fn stream(archive: Vec<u8>) -> Archive {
    Box::pin(io::Cursor::new(archive))
}

/// Reads the only file of an archive, of at most `most` bytes. `None`: the first entry is not a
/// regular file.
pub(super) async fn file(mut archive: Archive, most: usize) -> io::Result<Option<Vec<u8>>> {
    let mut head = [0; BLOCK];
    archive.read_exact(&mut head).await?;
    let size = std::str::from_utf8(&head[124..136]).unwrap_or_default();
    let size = usize::from_str_radix(size.trim_matches(['\0', ' ']), 8);
    let found = match size {
        Ok(size) if size <= most && matches!(head[156], b'0' | 0) => {
            // The buffer grows with the received bytes, not with the declared size.
            let mut contents = Vec::new();
            (&mut archive).take(size as u64).read_to_end(&mut contents).await?;
            if contents.len() < size {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Some(contents)
        }
        _ => None,
    };
    // The archive is valid only if its end was read. A longer archive was not written by Gantry.
    let passed_over = if found.is_some() { 0 } else { most as u64 };
    let mut end = archive.take(MAX_REST.saturating_add(passed_over));
    tokio::io::copy(&mut end, &mut tokio::io::sink()).await?;
    if end.limit() == 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "too many bytes follow the only file of the archive",
        ));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn archive_round_trip_works_with_tar() {
        for size in [0, 1, 511, 512, 513, 100_000] {
            let contents: Vec<u8> = (0..size).map(|at: usize| u8::try_from(at % 251).unwrap_or(0)).collect();
            let archive = archive_of_file("manifest", &contents);
            let found = file(stream(archive.clone()), size).await.expect("an archive");
            assert_eq!(found.as_deref(), Some(&contents[..]));

            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("archive");
            std::fs::write(&path, archive).expect("write");
            let mut tar = std::process::Command::new("tar");
            let status = tar.arg("-xf").arg(&path).arg("-C").arg(directory.path()).status().expect("tar");
            assert!(status.success());
            assert_eq!(std::fs::read(directory.path().join("manifest")).expect("read"), contents);
        }
        let too_large = file(stream(archive_of_file("manifest", b"12345")), 4).await.expect("an archive");
        assert_eq!(too_large, None);
    }
}
