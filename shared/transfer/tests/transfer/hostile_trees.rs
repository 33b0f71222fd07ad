//! Tests of readers with corrupted input. Readers accept or reject any bytes, and stay within their
//! memory budget.
//!
//! Each case changes some bytes of valid input at random. `GANTRY_SEED` repeats one case.
//! `GANTRY_SOAK` runs further cases for this number of hours.
use std::env;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_transfer::*;
use tempfile::tempdir;

/// Numbers of cases without `GANTRY_SOAK`. Each test takes some seconds.
const MANIFESTS: u64 = 3000;
const ARCHIVES: u64 = 200;
/// Bytes of a header block.
const BLOCK: usize = 512;

/// Random numbers of a case.
struct Draws {
    bytes: std::vec::IntoIter<u8>,
}

impl Draws {
    fn new(case: u64) -> Self {
        Self { bytes: crate::common::noise(case, 4096).into_iter() }
    }

    fn byte(&mut self) -> u8 {
        self.bytes.next().unwrap_or_default()
    }

    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        let number = [(); 4].map(|()| self.byte());
        u32::from_le_bytes(number) as usize % end.max(1)
    }
}

/// Runs `check` for each case, and prints the seed of a failed case.
fn each(cases: u64, check: impl Fn(u64)) {
    struct PrintSeed(u64);
    impl Drop for PrintSeed {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("GANTRY_SEED={}", self.0);
            }
        }
    }
    let setting = |name| env::var(name).ok().map(|text: String| text.parse::<u64>().expect("a number"));
    let one = |case| {
        let _seed = PrintSeed(case);
        check(case);
    };
    if let Some(case) = setting("GANTRY_SEED") {
        return one(case);
    }
    (0..cases).for_each(one);
    if let Some(hours) = setting("GANTRY_SOAK") {
        let until = Instant::now() + Duration::from_secs(hours * 3600);
        (cases..).take_while(|_| Instant::now() < until).for_each(one);
    }
}

/// Changes some bytes.
fn change(bytes: &mut Vec<u8>, draws: &mut Draws) {
    for _ in 0..=draws.below(6) {
        let at = draws.below(bytes.len());
        let length = draws.below(40).min(bytes.len() - at);
        match draws.below(6) {
            0 if !bytes.is_empty() => bytes[at] = draws.byte(),
            1 if !bytes.is_empty() => bytes[at] ^= 1 << draws.below(8),
            2 => drop(bytes.drain(at..at + length)),
            3 => {
                let piece = bytes[at..at + length].to_vec();
                let to = draws.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            // A large number in any of the encodings.
            4 => drop(bytes.splice(at..at, [0xff, 0xff, 0xff, 0xff, 0x7f])),
            _ => bytes[at..at + length].fill(b'7'),
        }
    }
}

#[test]
fn corrupted_manifest_stays_within_budget() {
    static BUDGET: Budget = Budget::new(64 << 10);
    let limits = Limits { budget: Some(&BUDGET), ..Limits::default() };
    let directory = tempdir().unwrap();
    crate::common::everything(directory.path());
    let valid = crate::common::manifest_of(directory.path()).encode();
    each(MANIFESTS, |case| {
        let (mut bytes, mut draws) = (valid.clone(), Draws::new(case));
        change(&mut bytes, &mut draws);
        if let Ok(manifest) = Manifest::decode(&bytes, limits) {
            let again = Manifest::decode(&manifest.encode(), Limits::default()).expect("valid");
            assert_eq!(again.tree_digest(), manifest.tree_digest());
        }
        // The same bytes as the parts of a transfer.
        let mut builder = ManifestBuilder::new(limits);
        for piece in bytes.chunks(1 + draws.below(200)) {
            _ = builder.begin_encoded(piece).and_then(|()| builder.push_encoded(piece));
        }
        drop(builder);
        assert_eq!(BUDGET.reserved(), 0);
    });
}

/// Whether a block has the checksum of a header.
fn is_sealed(block: &[u8]) -> bool {
    sum(block) == block[148..156]
}

fn sum(block: &[u8]) -> [u8; 8] {
    let counted = block.iter().enumerate().map(|(at, byte)| match at {
        148..156 => u32::from(b' '),
        _ => u32::from(*byte),
    });
    format!("{:06o}\0 ", counted.sum::<u32>()).into_bytes().try_into().expect("eight bytes")
}

#[test]
fn corrupted_archive_stays_within_budget() {
    static BUDGET: Budget = Budget::new(64 << 10);
    let limits = Limits { budget: Some(&BUDGET), ..Limits::default() };
    let directory = tempdir().unwrap();
    crate::common::everything(directory.path());
    let long = "long/".repeat(40);
    std::fs::create_dir_all(directory.path().join(long)).unwrap();
    let manifest = Arc::new(crate::common::manifest_of(directory.path()));
    let mut reader = TreeReader::new(directory.path(), manifest.clone(), ReadOptions::default()).unwrap();
    let mut writer = ArchiveWriter::new(Vec::new(), manifest.clone());
    for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
        for extent in batch.unwrap() {
            writer.put(extent.ordinal, &extent.data).unwrap();
        }
    }
    let valid = writer.finish().unwrap();
    let headers: Vec<_> =
        (0..valid.len() / BLOCK).filter(|at| is_sealed(&valid[at * BLOCK..(at + 1) * BLOCK])).collect();
    assert!(headers.len() > manifest.entries().len(), "the archive has PAX headers");
    each(ARCHIVES, |case| {
        let (mut bytes, mut draws) = (valid.clone(), Draws::new(case));
        if draws.below(3) == 0 {
            change(&mut bytes, &mut draws);
        } else {
            // Changes a header or the block after it, and corrects the checksum.
            for _ in 0..=draws.below(4) {
                let at = headers[draws.below(headers.len())] * BLOCK;
                let end = bytes.len().min(at + 2 * BLOCK);
                let length = end - at;
                let mut piece = bytes[at..end].to_vec();
                change(&mut piece, &mut draws);
                piece.resize(length, b'0');
                let sealed = sum(&piece[..BLOCK]);
                piece[148..156].copy_from_slice(&sealed);
                bytes[at..end].copy_from_slice(&piece);
            }
        }
        // A header may declare a huge file. The reader must not wait for missing bytes.
        let read = ArchiveReader::new(&bytes[..]).read(limits, |_| Ok(()));
        if let Ok(read) = &read {
            let again = Manifest::decode(&read.encode(), Limits::default()).expect("valid");
            assert_eq!(again.tree_digest(), read.tree_digest());
        }
        drop(read);
        assert_eq!(BUDGET.reserved(), 0);
        _ = ArchiveReader::new(&bytes[..]).compare(&manifest, |_| ());
    });
}
