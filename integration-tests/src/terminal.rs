//! Pseudo-terminal in which a test types, with a command that runs in it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::wait_for;

/// Script of the shell that runs the command. It keeps the terminal open after the command, so that
/// the test can read the mode that the command left.
const SHELL: &str = "trap : INT QUIT\n\"$0\" \"$@\"\necho \"ended with $?\"\nread -r _";

/// Terminal in which a command runs.
pub struct Terminal {
    ours: OwnedFd,
    shell: Child,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Runs a command in a new terminal of this size.
    #[must_use]
    pub fn run(command: &Command, rows: u16, columns: u16) -> Self {
        let (ours, theirs) = testing::terminal::open(rows, columns).expect("a terminal");
        let end = || Stdio::from(theirs.try_clone().expect("another descriptor"));
        let mut shell = Command::new("sh");
        shell.args(["-c", SHELL]).arg(command.get_program()).args(command.get_args());
        shell.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.current_dir(command.get_current_dir().expect("a directory"));
        shell.stdin(end()).stdout(end()).stderr(end());
        // SAFETY: the calls are safe between fork and exec.
        unsafe {
            shell.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(io::stdin())?;
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        let shell = shell.spawn().expect("a shell");
        let shown = Arc::<Mutex<Vec<u8>>>::default();
        let mut output = File::from(ours.try_clone().expect("another descriptor"));
        let copy = shown.clone();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // An error means that the other end is closed.
            while let Ok(length @ 1..) = output.read(&mut piece) {
                copy.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&piece[..length]);
            }
        });
        Self { ours, shell, shown }
    }

    /// Returns the process id of the shell that runs the command.
    #[must_use]
    pub fn shell(&self) -> u32 {
        self.shell.id()
    }

    /// Types keys.
    pub fn press(&self, keys: &str) {
        let mut terminal = File::from(self.ours.try_clone().expect("another descriptor"));
        terminal.write_all(keys.as_bytes()).expect("typed");
    }

    /// Changes the size of the terminal.
    pub fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.ours, size).expect("resized");
    }

    /// Returns everything that was shown.
    #[must_use]
    pub fn text(&self) -> String {
        let shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&shown).into_owned()
    }

    /// Waits until the terminal shows a text.
    pub fn wait_for(&self, text: &str) {
        wait_for(&format!("{text:?} on a terminal that shows {:?}", self.text()), || {
            self.text().contains(text).then_some(())
        });
    }

    /// Returns whether the terminal handles lines, echo and Ctrl-C, as before the command.
    #[must_use]
    pub fn is_cooked(&self) -> bool {
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        tcgetattr(self.ours.as_fd()).expect("a terminal").local_modes.contains(cooked)
    }

    /// Waits for the end of the command. Checks its exit code, and that the mode of the terminal is
    /// restored.
    pub fn ended(&self, code: i32) {
        self.wait_for("ended with ");
        self.wait_for(&format!("ended with {code}\r\n"));
        assert!(self.is_cooked(), "the mode is not restored: {:?}", self.text());
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the terminal ---\n{:?}", self.text());
        }
        // The shell may have ended. The command receives SIGHUP when its terminal closes.
        _ = self.shell.kill();
        _ = self.shell.wait();
    }
}
