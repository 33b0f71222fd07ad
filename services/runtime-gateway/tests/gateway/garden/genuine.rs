//! The genuine Garden server package, as a Go program.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
}

/// The program, built once into the target directory. `None` without Go.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        if Command::new("go").arg("version").output().is_err() {
            return None;
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/garden-server");
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("garden-server");
        let mut go = Command::new("go");
        let built = go.args(["build", "-o"]).arg(&program).arg(".").current_dir(source).output();
        let built = built.expect("go runs");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(program)
    };
    PROGRAM.get_or_init(build).as_deref()
}

impl Server {
    /// `None` if this machine has no Go, or this process may not mount.
    pub(crate) fn start() -> Option<Self> {
        let Some(program) = program() else {
            eprintln!("not applicable: go is not installed");
            return None;
        };
        if !rustix::process::geteuid().is_root() {
            eprintln!("not applicable: this process is not root");
            return None;
        }
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // The child is waited for on every path below.
        let mut server = Self { child: command.spawn().expect("start a server"), address: String::new() };
        let mut address = String::new();
        let stdout = server.child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut address).expect("read an address");
        address.trim().clone_into(&mut server.address);
        // The server prints its address shortly before it listens.
        for _ in 0..1000 {
            if std::net::TcpStream::connect(&server.address).is_ok() {
                return Some(server);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("the server does not listen on {:?}", server.address);
    }
}

impl Drop for Server {
    /// Closing its input ends the processes and the server.
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // A failure to wait is ignored.
        _ = self.child.wait();
    }
}
