//! Tests with malformed archives. Each archive is rejected or decoded in bounded memory.
//!
//! Each case changes some bytes of a valid archive. The changes are derived from a number.
//! `GANTRY_SEED` repeats one case. `GANTRY_SOAK` runs new cases for this many hours.
use std::env;
use std::time::{Duration, Instant};

use gantry_concourse::baggageclaim::{Archive, Encoded, Encoding};
use tokio::io::AsyncReadExt;

/// Number of cases per encoding without `GANTRY_SOAK`.
const CASES: u64 = 1000;

/// A random generator (SplitMix64).
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (number ^ (number >> 31)) as usize % end.max(1)
    }
}

/// An archive with one partly compressible file.
fn plain() -> Vec<u8> {
    let directory = tempfile::tempdir().expect("a directory");
    let mut draws = Draws(1);
    let content: Vec<u8> =
        (0..60_000).map(|at| if at % 20_000 < 8000 { b'x' } else { draws.below(256) as u8 }).collect();
    std::fs::write(directory.path().join("file"), content).expect("write");
    let mut tar = std::process::Command::new("tar");
    tar.arg("-cf").arg("-").arg("-C").arg(directory.path()).arg("file");
    let packed = tar.output().expect("tar");
    assert!(packed.status.success());
    packed.stdout
}

async fn check(case: u64, encoding: Encoding, valid: &[u8]) {
    let (mut bytes, mut draws) = (valid.to_vec(), Draws(case));
    for _ in 0..=draws.below(4) {
        let at = draws.below(bytes.len());
        match draws.below(4) {
            0 => bytes[at] = draws.below(256) as u8,
            1 => bytes[at] ^= 1 << draws.below(8),
            2 => bytes.truncate(at.max(1)),
            _ => drop(bytes.splice(at..at, [0xff; 3])),
        }
    }
    let mut archive = Archive::new(encoding, &bytes[..]);
    let (mut read, mut buffer) = (0_u64, vec![0; 64 << 10]);
    loop {
        match archive.read(&mut buffer).await {
            // The archive is complete or was rejected.
            Ok(0) | Err(_) => break,
            Ok(length) => read += length as u64,
        }
        // A small input can decode to a large archive. Reading a part of it is enough.
        if read > 64 << 20 {
            break;
        }
    }
}

#[tokio::test]
async fn mutated_archive_is_rejected_or_decoded() {
    let setting = |name| env::var(name).ok().map(|text: String| text.parse::<u64>().expect("a number"));
    let until = setting("GANTRY_SOAK").map(|hours| Instant::now() + Duration::from_secs(hours * 3600));
    let plain = plain();
    let mut valid = Vec::new();
    for encoding in Encoding::ALL {
        let mut encoded = Vec::new();
        let mut encoder = Encoded::new(encoding, &plain[..]).expect("an encoder");
        encoder.read_to_end(&mut encoded).await.expect("encoded");
        valid.push((encoding, encoded));
    }
    let first = setting("GANTRY_SEED");
    let mut case = first.unwrap_or(0);
    loop {
        for (encoding, encoded) in &valid {
            eprintln!("GANTRY_SEED={case} {encoding:?}");
            check(case, *encoding, encoded).await;
        }
        case += 1;
        let is_over = until.is_none_or(|until| Instant::now() >= until);
        if first.is_some() || (case >= CASES && is_over) {
            break;
        }
    }
}
