//! Benchmark of trees of several shapes, compared with `tar c | tar x`.
//!
//! `cargo bench -p gantry-transfer` creates the trees in `/dev/shm` (or in `GANTRY_BENCH_DIR`), so
//! that it does not measure a disk. It prints the best of several rounds in milliseconds: the
//! elapsed time, and the processor time including child processes, which is more precise on a busy
//! machine.
#![allow(clippy::print_stdout)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use gantry_transfer::{
    Manifest, OrdinalRanges, ReadOptions, ScanOptions, StatCache, TreeReader, TreeWriter, WriteOptions, scan,
};

const ROUNDS: usize = 5;

/// The shape of a tree: the numbers of directories and files, and the size of each file in bytes.
#[derive(Clone, Copy)]
struct Shape {
    directories: usize,
    files_each: usize,
    bytes_each: usize,
}

const SHAPES: [Shape; 3] = [
    Shape { directories: 100, files_each: 100, bytes_each: (1 << 30) / 10_000 },
    Shape { directories: 100, files_each: 100, bytes_each: 1 << 10 },
    Shape { directories: 1, files_each: 1, bytes_each: 1 << 30 },
];

fn main() {
    // `cargo test --all-targets` runs this program, too.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    for shape in SHAPES {
        measure(shape);
    }
}

fn measure(shape: Shape) {
    let files = shape.directories * shape.files_each;
    println!("{files} files of {} bytes", shape.bytes_each);
    let parent =
        std::env::var_os("GANTRY_BENCH_DIR").map_or_else(|| PathBuf::from("/dev/shm"), PathBuf::from);
    let dir = tempfile::tempdir_in(parent).expect("a place for the tree");
    let from = dir.path().join("from");
    let to = dir.path().join("to");
    make(&from, shape);

    let options = ScanOptions { settle: Duration::ZERO, ..ScanOptions::default() };
    report("scan without cache", || {}, || _ = scan(&from, &options, None).expect("scan"));

    let mut cache = StatCache::new();
    let scanned = scan(&from, &options, Some(&mut cache)).expect("scan");
    report("scan with cache", || {}, || _ = scan(&from, &options, Some(&mut cache)).expect("scan"));
    let saved = dir.path().join("cache");
    report("save cache", || {}, || cache.save(&saved).expect("save"));
    report("load cache", || {}, || assert_eq!(StatCache::load(&saved).cache.len(), files));

    let manifest = Arc::new(scanned.manifest);
    let clear = || {
        _ = fs::remove_dir_all(&to);
        fs::create_dir(&to).expect("a directory");
    };
    report(
        "read",
        || {},
        || {
            let mut reader =
                TreeReader::new(&from, manifest.clone(), ReadOptions::default()).expect("reader");
            let all = OrdinalRanges::all(manifest.extent_count());
            let bytes: usize = reader.batches(&all).map(|batch| batch.expect("batch").len()).sum();
            assert!(bytes > 0);
        },
    );
    report("read and write, one thread", clear, || copy(&from, &to, &manifest));
    report("read and write, two threads", clear, || copy_with_reader(&from, &to, &manifest));
    report("scan, read and write", clear, || {
        let manifest = Arc::new(scan(&from, &options, None).expect("scan").manifest);
        copy_with_reader(&from, &to, &manifest);
    });
    report("scan with cache, read and write", clear, || {
        let manifest = Arc::new(scan(&from, &options, Some(&mut cache)).expect("scan").manifest);
        copy_with_reader(&from, &to, &manifest);
    });
    report("tar c | tar x", clear, || {
        let status = Command::new("sh")
            .args(["-c", "tar -C \"$1\" -cf - . | tar -C \"$2\" -xf -", "sh"])
            .args([&from, &to])
            .status();
        assert!(status.expect("tar").success());
    });
}

fn copy(from: &Path, to: &Path, manifest: &Arc<Manifest>) {
    let mut reader = TreeReader::new(from, manifest.clone(), ReadOptions::default()).expect("reader");
    let mut writer = TreeWriter::new(to, manifest.clone(), WriteOptions::default()).expect("writer");
    for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
        for extent in batch.expect("batch") {
            writer.put(extent.ordinal, &extent.data).expect("put");
        }
    }
    writer.finish().expect("finish");
}

/// Reads and verifies in one thread, and writes in another one.
fn copy_with_reader(from: &Path, to: &Path, manifest: &Arc<Manifest>) {
    let (batches, received) = sync_channel(8);
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut reader = TreeReader::new(from, manifest.clone(), ReadOptions::default()).expect("reader");
            for batch in reader.batches(&OrdinalRanges::all(manifest.extent_count())) {
                let verify = |extent: gantry_transfer::ExtentData| {
                    manifest.verify(extent.ordinal, extent.data).expect("digest")
                };
                let verified: Vec<_> = batch.expect("batch").into_iter().map(verify).collect();
                batches.send(verified).expect("writer");
            }
        });
        let mut writer = TreeWriter::new(to, manifest.clone(), WriteOptions::default()).expect("writer");
        for extent in received.iter().flatten() {
            writer.put_verified(&extent).expect("put");
        }
        writer.finish().expect("finish");
    });
}

fn report(what: &str, prepare: impl Fn(), mut run: impl FnMut()) {
    let time = |_| {
        prepare();
        let (start, processor) = (Instant::now(), processor_time());
        run();
        (start.elapsed(), processor_time() - processor)
    };
    let times: Vec<_> = (0..ROUNDS).map(time).collect();
    let milliseconds =
        |times: &mut dyn Iterator<Item = Duration>| times.min().unwrap_or_default().as_millis();
    let elapsed = milliseconds(&mut times.iter().map(|(elapsed, _)| *elapsed));
    let processor = milliseconds(&mut times.iter().map(|(_, processor)| *processor));
    println!("{what:>34}: {elapsed:6} ms, {processor:6} ms of processors");
}

/// Returns the processor time of this process and its children, with a resolution of 10 ms.
fn processor_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").expect("a process");
    let ticks = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(4);
    Duration::from_millis(10 * ticks.map(|ticks| ticks.parse::<u64>().unwrap_or_default()).sum::<u64>())
}

/// Creates a tree. Half of each file is random, and half is text.
fn make(root: &Path, shape: Shape) {
    let mut content: Vec<u8> =
        b"all work and no play ".iter().copied().cycle().take(shape.bytes_each).collect();
    for directory in 0..shape.directories {
        let directory_path = root.join(format!("dir-{directory:03}"));
        fs::create_dir_all(&directory_path).expect("a directory");
        for file in 0..shape.files_each {
            let seed = (directory * shape.files_each + file) as u64;
            let noise = &mut content[..shape.bytes_each / 2];
            blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(noise);
            fs::write(directory_path.join(format!("file-{file:04}")), &content).expect("a file");
        }
    }
}
