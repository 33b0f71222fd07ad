//! The genuine Garden server package, as a program in Go.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
}

/// Built once, into the target directory. `None` without Go.
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
    /// `None` where this machine has no Go, or this process may not mount.
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
        // Whatever happens below, it is waited for.
        let mut server = Self { child: command.spawn().expect("start a server"), address: String::new() };
        let mut address = String::new();
        let stdout = server.child.stdout.take().expect("a pipe");
        BufReader::new(stdout).read_line(&mut address).expect("read an address");
        address.trim().clone_into(&mut server.address);
        // It says where it will listen, and a moment later does.
        for _ in 0..1000 {
            if std::net::TcpStream::connect(&server.address).is_ok() {
                return Some(server);
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        panic!("the server does not listen at {:?}", server.address);
    }
}

impl Drop for Server {
    /// It ends its processes, and itself, when its input ends.
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // That it cannot be waited for would be told by nobody.
        _ = self.child.wait();
    }
}
