//! The programs of the conformance suite, implemented in Rust.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use domain::workload::{Bytes, Failure, FailureReason};
use runtime::OutputStream::{self, Stderr, Stdout};
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

use super::containers::{Container, text};
use super::process::Process;
use crate::conformance::programs::{counted, script};

const HUP: u8 = 1;
const INT: u8 = 2;
const USR1: u8 = 10;
const TERM: u8 = 15;
/// Exit code of a shell that cannot write a file.
const CANNOT_WRITE: u8 = 2;

/// A program of the conformance suite, with its parameters.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Program {
    Exit(u8),
    SignalItself(u8),
    Sleep(Duration),
    Stubborn,
    Say(String, String),
    Count(u64),
    Cat,
    Deaf,
    Append(PathBuf),
    AppendAndWaitForAnother(PathBuf),
    LeaveBehind(PathBuf),
    Environment,
    AttemptLocation,
    Trap,
    TerminalSize,
    Listen(u16),
    Connect(u16),
}

impl Program {
    /// Parses a command. The error is the reason why no process can be started.
    pub(super) fn find(command: &[Bytes], container: &Container) -> Result<Self, Failure> {
        let failure = |reason, message: String| Failure { reason, message };
        let words: Vec<_> = command.iter().map(|word| text(word)).collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        match &words[..] {
            ["true"] => return Ok(Self::Exit(0)),
            ["false"] => return Ok(Self::Exit(1)),
            ["cat"] => return Ok(Self::Cat),
            ["env"] => return Ok(Self::Environment),
            ["sleep", seconds] => {
                if let Some(time) =
                    seconds.parse().ok().and_then(|time| Duration::try_from_secs_f64(time).ok())
                {
                    return Ok(Self::Sleep(time));
                }
            }
            _ => {}
        }
        if let Some((name, arguments)) = script(&words) {
            let known = Self::of_script(name, &arguments);
            return known.ok_or_else(|| {
                failure(
                    FailureReason::StartFailed,
                    format!("the fake worker cannot run {name} with {arguments:?}"),
                )
            });
        }
        let program = words.first().copied().unwrap_or_default();
        if matches!(program, "/bin/sh" | "sh" | "cat" | "env" | "sleep") {
            let message =
                format!("the fake worker runs only the programs of the conformance suite, not {words:?}");
            return Err(failure(FailureReason::StartFailed, message));
        }
        let found = program.contains('/').then(|| container.open(Path::new(program), OFlags::PATH));
        match found {
            Some(Ok(_)) => Err(failure(
                FailureReason::ProgramNotExecutable,
                format!("{program} is not a program of the fake worker"),
            )),
            _ => Err(failure(FailureReason::ProgramNotFound, format!("program {program} does not exist"))),
        }
    }

    fn of_script(name: &str, arguments: &[&str]) -> Option<Self> {
        let path = || arguments.first().map(PathBuf::from);
        Some(match (name, arguments) {
            ("EXIT", [code]) => Self::Exit(code.parse().ok()?),
            ("SIGNAL_ITSELF", [number]) => Self::SignalItself(number.parse().ok()?),
            // The fake worker measures no usage.
            ("HOLD", [_]) => Self::Sleep(Duration::from_secs(1000)),
            ("STUBBORN", []) => Self::Stubborn,
            ("SAY", [out, err]) => Self::Say((*out).to_owned(), (*err).to_owned()),
            ("COUNT", [bytes]) => Self::Count(bytes.parse().ok()?),
            ("DEAF", []) => Self::Deaf,
            ("APPEND", [_]) => Self::Append(path()?),
            ("APPEND_AND_WAIT_FOR_ANOTHER", [_]) => Self::AppendAndWaitForAnother(path()?),
            ("LEAVE_BEHIND", [_]) => Self::LeaveBehind(path()?),
            ("WHEREABOUTS", []) => Self::AttemptLocation,
            ("TRAP", []) => Self::Trap,
            ("WINDOW", []) => Self::TerminalSize,
            ("LISTEN", [port]) => Self::Listen(port.parse().ok()?),
            ("CONNECT", [port]) => Self::Connect(port.parse().ok()?),
            _ => return None,
        })
    }

    /// Runs the program and returns its exit code.
    pub(super) async fn run(&self, system: &System) -> u8 {
        match self {
            Self::Exit(code) => *code,
            Self::SignalItself(number) => {
                system.process.signal(*number);
                if system.process.is_dying() {
                    std::future::pending::<()>().await;
                }
                0
            }
            Self::Sleep(time) => {
                tokio::time::sleep(*time).await;
                0
            }
            Self::Stubborn => {
                system.process.ignore(TERM);
                system.say(Stdout, "ready\n").await;
                std::future::pending().await
            }
            Self::Say(out, err) => {
                system.say(Stdout, out).await;
                system.say(Stderr, err).await;
                0
            }
            Self::Count(bytes) => {
                system.count(*bytes).await;
                0
            }
            Self::Cat => loop {
                let read = system.process.read().await;
                if read.is_empty() {
                    return 0;
                }
                system.process.write(Stdout, &read).await;
            },
            Self::Deaf => {
                system.process.stop_reading();
                system.say(Stdout, "ready\n").await;
                std::future::pending().await
            }
            Self::Append(path) => match system.append(path).await {
                true => 0,
                false => CANNOT_WRITE,
            },
            Self::AppendAndWaitForAnother(path) => {
                // Like a shell, the program continues if it cannot write the file.
                system.append(path).await;
                while system.lines(path) < 2 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                system.say(Stdout, "over\n").await;
                7
            }
            Self::LeaveBehind(path) => {
                let left_behind = async {
                    loop {
                        system.append(path).await;
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                };
                let itself = async {
                    while system.lines(path) == 0 {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                };
                // Background work of the program ends with the program.
                tokio::select! {
                    () = left_behind => {}
                    () = itself => {}
                }
                0
            }
            Self::Environment => {
                let lines = system
                    .environment
                    .iter()
                    .flat_map(|(name, value)| [name.as_slice(), b"=", value, b"\n"].concat());
                system.process.write(Stdout, &lines.collect::<Vec<u8>>()).await;
                0
            }
            Self::AttemptLocation => system.print_whereabouts().await,
            Self::Trap => {
                system.process.catch(&[HUP, INT, USR1]);
                system.say(Stdout, "ready\n").await;
                loop {
                    match system.process.caught().await {
                        HUP => system.say(Stdout, "HUP\n").await,
                        INT => system.say(Stdout, "INT\n").await,
                        _ => {
                            system.say(Stdout, "USR1\n").await;
                            return 3;
                        }
                    }
                }
            }
            Self::TerminalSize => system.print_window().await,
            Self::Listen(port) => {
                system.container.listen(*port, &system.process);
                system.say(Stdout, "ready\n").await;
                std::future::pending().await
            }
            Self::Connect(port) => u8::from(!system.container.connect(*port)),
        }
    }
}

/// The environment of a program.
pub(super) struct System {
    pub(super) process: Arc<Process>,
    pub(super) container: Arc<Container>,
    pub(super) environment: Vec<(Bytes, Bytes)>,
}

impl System {
    async fn say(&self, stream: OutputStream, text: &str) {
        self.process.write(stream, text.as_bytes()).await;
    }

    async fn count(&self, bytes: u64) {
        let mut at = 0;
        while at < bytes {
            // Whole lines, so that the next piece starts at a line start.
            let end = bytes.min(at + 50_000);
            let mut piece = Vec::with_capacity(50_010);
            for line in at / 10..end.div_ceil(10) {
                writeln!(piece, "{line:09}").expect("there is room");
            }
            debug_assert_eq!(piece[0], counted(at), "the piece starts at a line start");
            self.process.write(Stdout, &piece[..usize::try_from(end - at).unwrap_or(0)]).await;
            at = end;
        }
    }

    /// Appends a line to a file. If the file cannot be written, prints an error and returns
    /// `false`.
    async fn append(&self, path: &Path) -> bool {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
        let added = self.container.open(path, flags).and_then(|mut file| file.write_all(b"line\n"));
        if let Err(error) = &added {
            self.say(Stderr, &format!("cannot write {}: {error}\n", path.display())).await;
        }
        added.is_ok()
    }

    /// Counts the lines of a file. A missing file has none.
    fn lines(&self, path: &Path) -> usize {
        let mut contents = Vec::new();
        let read =
            self.container.open(path, OFlags::RDONLY).and_then(|mut file| file.read_to_end(&mut contents));
        read.map_or(0, |_| contents.iter().filter(|byte| **byte == b'\n').count())
    }

    async fn print_whereabouts(&self) -> u8 {
        let directory = self.container.directory();
        let owner = self.container.open(&directory, OFlags::PATH).and_then(|file| file.metadata());
        let owner = owner.map_or_else(|error| error.to_string(), |found| found.uid().to_string());
        let (uid, gid) = (self.container.user.uid, self.container.user.gid);
        self.say(Stdout, &format!("{}\n{uid}\n{gid}\n{owner}\n", directory.display())).await;
        0
    }

    async fn print_window(&self) -> u8 {
        let tell = async || {
            let text = match self.process.window() {
                Some(window) => format!("{} {}\n", window.rows, window.columns),
                None => "not a terminal\n".to_owned(),
            };
            self.say(Stdout, &text).await;
        };
        tell().await;
        let mut typed = Vec::new();
        loop {
            let read = self.process.read().await;
            if read.is_empty() {
                return 5;
            }
            typed.extend(read);
            while let Some(end) = typed.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = typed.drain(..=end).collect();
                if line == b"end\n" {
                    return 5;
                }
                tell().await;
            }
        }
    }
}

/// Opens the relative path `path` below `root`. Symbolic links that lead out of `root` are not
/// followed.
pub(super) fn open_in(root: &Path, path: &Path, flags: OFlags) -> io::Result<File> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(root, directory, Mode::empty())?;
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let mode = if flags.contains(OFlags::CREATE) { Mode::from_raw_mode(0o644) } else { Mode::empty() };
    Ok(openat2(root, path, flags | OFlags::CLOEXEC, mode, ResolveFlags::IN_ROOT)?.into())
}
