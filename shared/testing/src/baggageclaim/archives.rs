//! Streaming tar archives, packed and unpacked by the `tar` of the host.

use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use bytes::{Buf, Bytes};
use tokio::sync::mpsc;

/// The supported encodings.
pub(super) const ENCODINGS: [&str; 4] = ["raw", "gzip", "zstd", "s2"];

/// Buffer size, in bytes.
const PIECE: usize = 256 << 10;

/// Bytes from a connection, as a reader for a thread. The end of the sender is the end of the
/// stream.
pub(super) struct Incoming {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Incoming {
    pub(super) fn new(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { pieces, piece: Bytes::new() }
    }
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let length = self.piece.len().min(buffer.len());
        self.piece.copy_to_slice(&mut buffer[..length]);
        Ok(length)
    }
}

/// Bytes of a thread, for a connection.
pub(super) struct Outgoing(pub(super) mpsc::Sender<io::Result<Bytes>>);

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map(|()| bytes.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn start(program: &mut Command, stdin: Stdio) -> Child {
    let program = program.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::null());
    program.spawn().expect("tar and gzip are installed")
}

fn ended_well(mut child: Child) -> bool {
    child.wait().expect("a program that can be waited for").success()
}

/// Copies all bytes and counts them. `false`: the source failed before its end.
fn copy_all(mut from: impl Read, mut into: impl Write) -> (u64, bool) {
    let (mut buffer, mut count, mut takes) = (vec![0; PIECE], 0, true);
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return (count, true),
            Ok(length) => {
                count += length as u64;
                // A program that has read enough closes its input. The remaining bytes are
                // discarded.
                takes = takes && into.write_all(&buffer[..length]).is_ok();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return (count, false),
        }
    }
}

/// Unpacks a stream. Returns whether it was a valid archive.
pub(super) fn unpack(encoding: &str, body: impl Read + Send, into: &Path) -> bool {
    let mut tar = start(Command::new("tar").args(["--numeric-owner", "-x", "-C"]).arg(into), Stdio::piped());
    let stdin = tar.stdin.take().expect("a pipe");
    let (count, whole) = match encoding {
        "raw" => copy_all(body, stdin),
        "zstd" => zstd::Decoder::new(body).map_or((0, false), |decoder| copy_all(decoder, stdin)),
        "s2" => copy_all(minlz::Reader::new(body), stdin),
        _ => {
            let mut gzip = start(Command::new("gzip").arg("-dc"), Stdio::piped());
            let feed = gzip.stdin.take().expect("a pipe");
            let decoded = gzip.stdout.take().expect("a pipe");
            let (fed, poured) = std::thread::scope(|scope| {
                let fed = scope.spawn(|| copy_all(body, feed).1);
                let poured = copy_all(decoded, stdin);
                (fed.join().expect("no panic"), poured)
            });
            (poured.0, fed & poured.1 & ended_well(gzip))
        }
    };
    let unpacked = ended_well(tar);
    // GNU tar accepts empty input as an empty plain archive. The genuine worker does not.
    whole && unpacked && count > 0
}

/// Copies the output of a program. The program ends when its reader is gone.
fn copy_output(mut from: impl Read, into: &mut impl Write) -> io::Result<bool> {
    io::copy(&mut from, into).map(|_| true)
}

/// Packs the contents of a directory, or one file. Returns whether everything was readable, or the
/// error of the output.
///
/// Compresses with programs of the host, or with a library if there is none. `owners` is the map of
/// user and group ids.
pub(super) fn pack(encoding: &str, path: &Path, owners: Option<&Path>, out: impl Write) -> io::Result<bool> {
    let mut tar = Command::new("tar");
    tar.arg("--numeric-owner");
    for option in owners.into_iter().flat_map(|_| ["--owner-map", "--group-map"]) {
        tar.arg(option).args(owners);
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !path.is_dir() => tar.arg("-c").arg("-C").arg(parent).arg(name),
        _ => tar.args(["-c", "-C"]).arg(path).arg("."),
    };
    let mut tar = start(&mut tar, Stdio::null());
    let packed = BufReader::with_capacity(PIECE, tar.stdout.take().expect("a pipe"));
    let mut out = BufWriter::with_capacity(PIECE, out);
    let copied = match encoding {
        "raw" => copy_output(packed, &mut out),
        "gzip" => {
            let packed = Stdio::from(packed.into_inner());
            let mut gzip = start(Command::new("gzip").arg("-c"), packed);
            let mut stdout = gzip.stdout.take().expect("a pipe");
            let copied = io::copy(&mut stdout, &mut out);
            drop(stdout);
            let well = ended_well(gzip);
            copied.map(|_| well)
        }
        "zstd" => zstd::stream::copy_encode(packed, &mut out, 0).map(|()| true),
        "s2" => {
            let mut encoder = minlz::Writer::new(&mut out);
            copy_output(packed, &mut encoder).and_then(|well| encoder.flush().map(|()| well))
        }
        _ => Err(io::ErrorKind::Unsupported.into()),
    };
    let whole = ended_well(tar);
    let well = copied?;
    out.flush()?;
    Ok(whole && well)
}
