//! Local processes in place of those in containers, and the attachments to them.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use super::confine::Confined;
use super::{Break, Manner, groups, lock};

/// Number of writes that a stream buffers. Later writes are dropped.
const QUEUE: usize = 4000;

/// Output that was written and not yet fetched.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<(VecDeque<Vec<u8>>, bool)>,
    changed: Condvar,
}

impl Queue {
    fn push(&self, write: &[u8]) {
        let mut state = lock(&self.state);
        if state.0.len() < QUEUE && !state.1 {
            state.0.push_back(write.to_vec());
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        lock(&self.state).1 = true;
        self.changed.notify_all();
    }

    /// Removes the oldest write. Only one reader gets it. `None` at the end.
    pub(super) fn pop(&self) -> Option<Vec<u8>> {
        let state = lock(&self.state);
        let waiting = |state: &mut (VecDeque<_>, bool)| state.0.is_empty() && !state.1;
        let mut state =
            self.changed.wait_while(state, waiting).unwrap_or_else(|poisoned| poisoned.into_inner());
        state.0.pop_front()
    }
}

/// The attachment of one Run or Attach request.
#[derive(Default)]
pub(super) struct Attachment {
    pub stdout: Queue,
    pub stderr: Queue,
    pub client_gone: AtomicBool,
    pub broken: Mutex<Option<Break>>,
    closed: Mutex<Option<Instant>>,
}

impl Attachment {
    pub(super) fn close(&self) {
        self.stdout.close();
        self.stderr.close();
        lock(&self.closed).get_or_insert_with(Instant::now);
    }

    pub(super) fn is_valid(&self, validity: Duration) -> bool {
        lock(&self.closed).is_none_or(|closed| closed.elapsed() < validity)
    }
}

pub(super) struct Process {
    pub id: String,
    manner: Manner,
    group: Pid,
    terminal: Option<OwnedFd>,
    stdin: Mutex<Option<File>>,
    attachments: Mutex<Vec<Arc<Attachment>>>,
    attached: Condvar,
    ended: AtomicBool,
    pub exit: Mutex<Option<i32>>,
}

pub(super) struct Start<'a> {
    pub id: String,
    pub program: &'a Path,
    pub args: Vec<String>,
    pub env: Vec<String>,
    pub dir: &'a Path,
    pub confined: Option<Confined>,
    /// Files to enter the control groups of the container.
    pub entrances: Vec<File>,
    pub terminal: Option<(u16, u16)>,
}

impl Process {
    /// Starts a process that is attached to `first`, and calls `when_ended` after its end.
    pub(super) fn start(
        start: Start<'_>,
        manner: Manner,
        first: Arc<Attachment>,
        when_ended: impl FnOnce(&Process, i32) + Send + 'static,
    ) -> io::Result<Arc<Self>> {
        let mut command = Command::new(start.program);
        command.args(start.args).current_dir(start.dir);
        if manner != Manner::Houdini {
            command.env_clear();
        }
        if !start.entrances.is_empty() {
            let entrances = start.entrances;
            // SAFETY: the function only writes to open files.
            unsafe { command.pre_exec(move || groups::enter(&entrances)) };
        }
        if let Some(confined) = start.confined {
            // SAFETY: the function makes only calls that are allowed between fork and exec.
            unsafe { command.pre_exec(move || confined.enter()) };
        }
        command.envs(start.env.iter().filter_map(|pair| pair.split_once('=')));
        let (child, stdin, terminal, outputs) = match start.terminal {
            Some((columns, rows)) => {
                let (ours, theirs) = crate::terminal::open(rows, columns)?;
                let end = || theirs.try_clone().map(Stdio::from);
                command.stdin(end()?).stdout(end()?).stderr(end()?);
                // SAFETY: both calls are allowed between fork and exec.
                unsafe {
                    command.pre_exec(|| {
                        if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                            return Err(io::Error::last_os_error());
                        }
                        Ok(())
                    })
                };
                let child = command.spawn()?;
                drop(command);
                let stdin = File::from(ours.try_clone()?);
                let output = File::from(ours.try_clone()?);
                (child, stdin, Some(ours), vec![(output, false)])
            }
            None => {
                command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
                let mut child = command.spawn()?;
                let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
                let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
                    return Err(io::Error::other("no pipes"));
                };
                let outputs = [(OwnedFd::from(stdout), false), (OwnedFd::from(stderr), true)];
                let outputs =
                    outputs.into_iter().map(|(end, is_stderr)| (File::from(end), is_stderr)).collect();
                (child, File::from(OwnedFd::from(stdin)), None, outputs)
            }
        };
        let group = Pid::from_child(&child);
        let process = Arc::new(Self {
            id: start.id,
            manner,
            group,
            terminal,
            stdin: Mutex::new(Some(stdin)),
            attachments: Mutex::new(vec![first]),
            attached: Condvar::new(),
            ended: AtomicBool::new(false),
            exit: Mutex::new(None),
        });
        let pumps: Vec<_> = outputs
            .into_iter()
            .map(|(output, is_stderr)| {
                let process = Arc::clone(&process);
                std::thread::spawn(move || process.pump(output, is_stderr))
            })
            .collect();
        let waited = Arc::clone(&process);
        std::thread::spawn(move || waited.wait(child, pumps, when_ended));
        Ok(process)
    }

    fn wait(
        &self,
        mut child: Child,
        pumps: Vec<std::thread::JoinHandle<()>>,
        when_ended: impl FnOnce(&Process, i32),
    ) {
        let status = child.wait().expect("a child can be waited for");
        let exit = status.code().unwrap_or_else(|| match self.manner {
            Manner::Houdini => -1,
            Manner::Containerd | Manner::Guardian => 128 + status.signal().unwrap_or(0),
        });
        self.ended.store(true, Ordering::SeqCst);
        {
            let _attachments = lock(&self.attachments);
            self.attached.notify_all();
        }
        // houdini does not wait for its copy of the output.
        if self.manner != Manner::Houdini {
            for pump in pumps {
                pump.join().expect("a pump does not panic");
            }
        }
        when_ended(self, exit);
        *lock(&self.exit) = Some(exit);
    }

    /// Copies output to the attachments. Without an attachment, the output stays in the pipe.
    fn pump(&self, mut output: File, is_stderr: bool) {
        let mut part = vec![0; 32 << 10];
        loop {
            if self.manner != Manner::Houdini {
                let attachments = lock(&self.attachments);
                let waiting =
                    |attachments: &mut Vec<_>| attachments.is_empty() && !self.ended.load(Ordering::SeqCst);
                let _attached = self.attached.wait_while(attachments, waiting);
            }
            match output.read(&mut part) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A terminal with a closed other end returns an error.
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    for attachment in &*lock(&self.attachments) {
                        let queue = if is_stderr { &attachment.stderr } else { &attachment.stdout };
                        queue.push(&part[..read]);
                    }
                }
            }
        }
    }

    /// houdini copies output to all attachments. With the other backends, the newest attachment
    /// gets the output.
    pub(super) fn attach(&self, attachment: Arc<Attachment>) {
        let mut attachments = lock(&self.attachments);
        if self.manner != Manner::Houdini {
            attachments.clear();
        }
        attachments.push(attachment);
        self.attached.notify_all();
    }

    pub(super) fn break_attachments(&self, how: Break) {
        for attachment in &*lock(&self.attachments) {
            *lock(&attachment.broken) = Some(how);
        }
    }

    /// The main connection of `attachment` has ended.
    pub(super) fn detach(&self, attachment: &Arc<Attachment>) {
        lock(&self.attachments).retain(|other| !Arc::ptr_eq(other, attachment));
        if self.manner == Manner::Containerd && self.terminal.is_none() {
            self.close_stdin();
        }
    }

    pub(super) fn write_stdin(&self, text: &[u8]) {
        // Without the lock: a process that does not read blocks the write, which must not block the
        // end of the process.
        let stdin = lock(&self.stdin).as_ref().and_then(|stdin| stdin.try_clone().ok());
        if let Some(mut stdin) = stdin {
            let _ = stdin.write_all(text);
        }
    }

    pub(super) fn close_stdin(&self) {
        if let Some(mut stdin) = lock(&self.stdin).take()
            && self.terminal.is_some()
        {
            // A terminal is not closed. The end of input is a character.
            let _ = stdin.write_all(&[4]);
        }
    }

    pub(super) fn resize(&self, columns: u16, rows: u16) {
        if let Some(terminal) = &self.terminal {
            let size = rustix::termios::Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
            let _ = rustix::termios::tcsetwinsize(terminal, size);
        }
    }

    /// Whether the process has ended, reported or not.
    pub(super) fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    pub(super) fn kill(&self, signal: Signal) {
        let _ = kill_process_group(self.group, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_holds_4000_writes_and_drops_newer() {
        let queue = Queue::default();
        for write in 0..6000_u32 {
            queue.push(&write.to_be_bytes());
        }
        queue.close();
        let fetched: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        let oldest: Vec<_> = (0..4000_u32).map(|write| write.to_be_bytes().to_vec()).collect();
        assert!(fetched == oldest, "{} writes", fetched.len());
    }
}
